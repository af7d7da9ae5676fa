"""torchrun for a node's ranks, which says in one line what ended them.

    python -m rlpost.agent [torchrun's options] -m rlpost.worker RUN_DIR

A signal goes to the ranks themselves, which stop with a checkpoint; torchrun alone would kill them half a minute later. Where a
rank fails the others are ended within seconds: they would wait for it.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from rlpost.status import RunStatus

GRACE = 10  # seconds that ranks have to end after another one failed


def main(arguments: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its tables of failures
    try:
        run(parse_args([f"--shutdown-timeout={GRACE}", "--signals-to-handle=SIGQUIT", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (2, 130):  # it has said why
            return failure.exitcode
        how = (
            f"by {signal.Signals(-failure.exitcode).name}"
            if failure.exitcode < 0
            else f"with exit code {failure.exitcode}"
        )
        reason = f"rank {rank} was ended {how}"
        print(f"rlpost: {reason}", file=sys.stderr)
        if failure.exitcode < 0:  # the others' errors are that they miss it
            RunStatus(Path(arguments[-1])).set_state("failed", error=reason)
        return 1
    return 0


def _pass_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
