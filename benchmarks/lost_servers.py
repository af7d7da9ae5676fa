"""A run whose only rollout server is killed, resumed, against the run that was left alone.

python -m benchmarks.lost_servers
"""

import os
import signal
import tempfile
from pathlib import Path

import psutil

from tests.runs import TINY, exact, rlpost, start, wait_for_steps

RUN = [
    *TINY,
    *("rollout=vllm_server", "rollout.engine.num_servers=1", "rollout.engine.threads=1", "+rollout.engine.retries=1"),
    *("rollout.max_tokens=60", "prompts_per_step=8", "steps=8", "checkpoint.every=2", "evaluation.at_end=false"),
    *("tracking=none", "cluster.threads=1"),
]


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rlpost(directory, *RUN, "run_dir=whole")
        process = start(directory, *RUN, "run_dir=run")
        wait_for_steps(directory / "run", 3, process)
        descendants = psutil.Process(process.pid).children(recursive=True)
        (server,) = (p for p in descendants if "vllm.entrypoints.openai.api_server" in p.cmdline())
        os.killpg(server.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        print(
            f"exit code {process.returncode}: {next(line for line in err.splitlines() if 'no rollout server' in line)}"
        )
        rlpost(directory, "run_dir=run", "resume=true")
        whole, resumed = exact(directory / "whole"), exact(directory / "run")
    print(f"{len(resumed)} steps, {'equal to the last bit' if resumed == whole else 'NOT equal'}")


if __name__ == "__main__":
    main()
