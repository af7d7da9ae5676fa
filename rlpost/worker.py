"""The program that a launcher starts: a run directory becomes objects, and the loop runs.

Exit codes: 0 finished; 1 failed while running; 2 the configuration or the input is wrong; 130 interrupted.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until the loop starts: imports make a million objects that stay, and each collection walks them all

import atexit
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from transformers.utils import logging as transformers_logging

from rlpost import distributed
from rlpost.assemble import assemble
from rlpost.cluster.node import name_process
from rlpost.cluster.ranks import LOST_PEERS
from rlpost.errors import UserError
from rlpost.loop import Interrupted, Loop
from rlpost.record.rundir import RunDir
from rlpost.record.tracker import Tracker

log = logging.getLogger("rlpost")


class StopFlag:
    """Set by SIGINT or SIGTERM; the loop stops at the next safe point. A second signal ends the process at once."""

    def __init__(self) -> None:
        self._is_set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """True if it is set on any rank; all of them ask together."""
        return distributed.any_rank(self._is_set)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
        log.warning("%s: stopping after a checkpoint (again: at once)", signal.Signals(number).name)


def main(run_dir: str, meeting: str | None = None) -> int:
    """Args: meeting: the descriptor of the socket at which the other ranks find rank 0, which has it from its launcher."""
    run = RunDir(Path(run_dir))
    stop = StopFlag()
    distributed.init(None if meeting is None else int(meeting))
    name_process(f"rlpost rank {distributed.rank()}")
    _set_up_logging(run.path / "run.log")
    tracker: Tracker | None = None
    loop: Loop | None = None
    try:
        loop = assemble(run, stop)
        tracker = loop.recorder.tracker
        age = time.time() - psutil.Process().create_time()
        log.info("ready for the first step: %.2f s, %.2f core-seconds of this process", age, time.process_time())
        gc.freeze()
        gc.enable()
        with loop.recorder.progress:
            evaluation = loop.run()
        if tracker:
            _finish(run, loop, tracker, evaluation)
        return 0
    except Interrupted:
        _end(run, tracker, "interrupted", "KILLED", step=loop.step if loop else 0)
        return 130
    except KeyboardInterrupt:
        _end(run, tracker, "interrupted", "KILLED")
        return 130
    except UserError as error:
        log.error("%s", error)
        if error.__cause__ is not None:  # a plug-in's own error: its author wants to know where
            logging.getLogger("rlpost.trace").debug("%s", traceback.format_exc())
        _end(run, tracker, "failed", "FAILED", error=str(error), kind="configuration")
        return 2
    except FloatingPointError as error:
        log.error("%s", error)
        _end(run, tracker, "failed", "FAILED", error=str(error), kind="diverged")
        return 1
    except Exception as error:
        logging.getLogger("rlpost.trace").debug("%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        if distributed.is_loss_of_peers(error):  # another rank says why, or its launcher
            log.info("%s", reason)
            _end(run, tracker, "failed", "FAILED", error=reason, kind="lost peers")
            return LOST_PEERS
        log.error("%s (the traceback is in %s)", reason, run.path / "run.log")
        _end(run, tracker, "failed", "FAILED", error=reason)
        return 1
    finally:
        if loop is not None:
            if distributed.world_size() == 1:  # others may be gone, and the writers would wait for them
                _finish_writing(loop)
            gc.freeze()  # vLLM collects garbage several times as it ends, too
            loop.sampler.close()
        distributed.shutdown()


def _finish(run: RunDir, loop: Loop, tracker: Tracker, evaluation: dict[str, float]) -> None:
    progress = loop.recorder.progress
    rows = [row for row in tracker.summary() if row["step"] > 0]

    def mean_reward(chosen: list[dict[str, Any]]) -> float | None:
        known = [row["reward/mean"] for row in chosen if row["reward/mean"] is not None]
        return sum(known) / len(known) if known else None

    result = {
        "steps": loop.step,
        "tokens": loop.recorder.tokens,
        "reward_first": mean_reward(rows[:1]),
        "reward_last_5": mean_reward(rows[-5:]),
        "logprob_diff_max": max(
            (d for row in rows if (d := row["rollout/logprob_diff_max"]) is not None), default=None
        ),
        "seconds": sum(row["time/step"] for row in rows),
        **evaluation,
        "mlflow_run_id": tracker.mlflow_run_id,
    }
    run.write_result(result)
    run.set_state("finished", step=loop.step if loop else 0)
    tracker.close("FINISHED", [run.path / "result.json", run.path / "metrics.jsonl"])
    shown = {k: v for k, v in result.items() if v is not None}
    progress.say("")
    for name, value in shown.items():
        progress.say(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")
    progress.say(f"  {'run directory':<28} {run.path}")


def _finish_writing(loop: Loop) -> None:
    """Let a checkpoint that is being written become whole, whatever ended the run."""
    try:
        loop.checkpoints.finish()
    except RuntimeError as error:
        log.error("%s", error)


def _end(run: RunDir, tracker: Tracker | None, state: Any, mlflow_status: Any, **details: Any) -> None:
    """The main rank writes the state; of a failure also the rank whose fault it was, which the others only lost."""
    lost_peers = details.get("kind") == "lost peers"
    is_told = state == "failed" and run.status().get("state") == "failed"
    if distributed.is_main() and not (lost_peers and is_told):
        run.set_state(state, **details)
    elif state == "failed" and not lost_peers and not is_told:
        run.set_state(state, **{**details, "error": f"rank {distributed.rank()}: {details['error']}"})
    if tracker:
        tracker.close(mlflow_status)


def _set_up_logging(file: Path) -> None:
    """Everything to run.log; warnings, and what rlpost has to say, to the terminal too."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    logging.getLogger("rlpost").setLevel(logging.DEBUG)
    rank = f"[{distributed.rank()}] " if distributed.world_size() > 1 else ""
    to_file = logging.FileHandler(file)
    to_file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {rank}%(name)s: %(message)s"))
    root.addHandler(to_file)
    logging.captureWarnings(True)
    transformers_logging.disable_progress_bar()
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setFormatter(logging.Formatter(f"rlpost: {rank}%(message)s"))
    to_terminal.setLevel(logging.WARNING)
    to_terminal.addFilter(logging.Filter("rlpost"))
    root.addHandler(to_terminal)


def _leave(code: int) -> NoReturn:
    """End the process as it stands: taking a million objects of vLLM and torch apart one by one takes seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(*sys.argv[1:]))
