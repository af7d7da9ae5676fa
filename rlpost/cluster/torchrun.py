"""torchrun for a node's ranks, which says in one line what ended them.

    python -m rlpost.cluster.torchrun [torchrun's options] -m rlpost.worker RUN_DIR

A signal goes to the ranks themselves, which stop with a checkpoint; torchrun alone would kill them half a minute later. Where a
rank fails the others are ended within seconds: they would wait for it.
"""

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from rlpost.cluster.ranks import conclude
from rlpost.record.status import RunStatus

GRACE = 10  # seconds that ranks have to end after another one failed


def main(arguments: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its tables of failures
    try:
        run(parse_args([f"--shutdown-timeout={GRACE}", "--signals-to-handle=SIGQUIT", *arguments]))
    except ChildFailedError as error:
        return conclude(_own_ends(error.failures), RunStatus(Path(arguments[-1])))
    return 0


def _own_ends(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """Exit codes by rank, without those of ranks that torchrun ended after the first failure."""
    first = min(failure.timestamp for failure in failures.values())

    def is_own(failure: ProcessFailure) -> bool:
        late = failure.timestamp - first >= GRACE - 1
        return failure.exitcode != -signal.SIGTERM and not (failure.exitcode == -signal.SIGKILL and late)

    own = {rank: failure.exitcode for rank, failure in failures.items() if is_own(failure)}
    return own or {rank: failure.exitcode for rank, failure in failures.items()}


def _pass_on(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
