"""A run's ranks as processes: watched until all have ended, and which of them is to be named if one failed."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlpost.cluster.process import Watched
from rlpost.record.status import RunStatus

LOST_PEERS = 75  # exit code of a rank that failed because others were gone
GRACE_S = 10.0  # that ranks have to end after another one failed
POLL_S = 0.02
WRONG, INTERRUPTED = 2, 130


def watch(ranks: Sequence[Watched], grace_s: float = GRACE_S, poll_s: float = POLL_S) -> dict[int, int]:
    """Wait until every rank has ended. Once one has failed the others are asked to stop, and killed after a grace time.

    Returns: the exit codes by rank, without those of ranks that were ended from here.
    """
    codes: dict[int, int] = {}
    signals: set[int] = set()  # sent from here to the ranks that were left
    ended_from_here: set[int] = set()
    deadline = math.inf
    while True:
        left = [rank for rank in range(len(ranks)) if rank not in codes]
        for rank in left:
            if (code := ranks[rank].poll()) is not None:
                codes[rank] = code
                if -code in signals:
                    ended_from_here.add(rank)
        left = [rank for rank in left if rank not in codes]
        if not left:
            return {rank: code for rank, code in sorted(codes.items()) if rank not in ended_from_here}
        if any(codes.values()) and not signals:
            deadline = time.monotonic() + grace_s
            _send(signal.SIGTERM, [ranks[rank] for rank in left], signals)
        elif time.monotonic() > deadline:  # they wait for the one that failed
            deadline = math.inf
            _send(signal.SIGKILL, [ranks[rank] for rank in left], signals)
        time.sleep(poll_s)


def _send(number: signal.Signals, ranks: Sequence[Watched], sent: set[int]) -> None:
    sent.add(number)
    for rank in ranks:
        rank.send_signal(number)


def cause(codes: Mapping[int, int]) -> tuple[int, int] | None:
    """The rank whose failure the others' followed, and its exit code; None if none failed.

    A rank that was killed could not say so itself and comes first. Next is one that failed by itself, then one that was
    interrupted, and last one that only lost its peers.
    """

    def order(item: tuple[int, int]) -> tuple[int, int]:
        rank, code = item
        return {INTERRUPTED: 2, LOST_PEERS: 3}.get(code, 0 if code < 0 else 1), rank

    return min(((rank, code) for rank, code in codes.items() if code), key=order, default=None)


def conclude(codes: Mapping[int, int], run: RunStatus) -> int:
    """Say in one line which rank ended the run, and if it was killed write that down for it. Returns: the run's exit code."""
    failed = cause(codes)
    if failed is None:
        return 0
    rank, code = failed
    if code in (WRONG, INTERRUPTED):  # it has said why
        return code
    reason = f"rank {rank} {_how(code)}"
    print(f"rlpost: {reason}", file=sys.stderr)
    if code < 0:
        run.set_state("failed", error=reason, kind="killed")
    return 1


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "lost the other ranks" if code == LOST_PEERS else f"was ended with exit code {code}"


@contextmanager
def signals_passed_on(send: Callable[[int], Any]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM go to the workers while this process waits for them. Yields: a list of those that came."""
    came: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        came.append(number)
        send(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
