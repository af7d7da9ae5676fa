"""Which rank is named for the end of a run, whoever was seen to end first."""

import itertools
import signal
from pathlib import Path

import pytest
import torch

from rlpost import distributed
from rlpost.cluster.ranks import LOST_PEERS, cause, conclude, watch
from rlpost.record.status import RunStatus


class Scripted:
    """A rank that ends with a code after it was asked so many times, or by the first signal that it obeys."""

    def __init__(self, code: int | None, after: int = 0, obeys: tuple[int, ...] = (signal.SIGKILL,)) -> None:
        self.pid, self.signals = 0, []
        self._code, self._left, self._obeys = code, after, obeys

    def poll(self) -> int | None:
        ended = [number for number in self.signals if number in self._obeys]
        if self._left <= 0 and self._code is not None:
            return self._code
        self._left -= 1
        return -ended[0] if ended else None

    def wait(self, timeout: float | None = None) -> int:
        raise NotImplementedError

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ({0: 0, 1: 0}, None),
        ({0: LOST_PEERS, 1: -9}, (1, -9)),
        ({0: LOST_PEERS, 1: 1, 2: LOST_PEERS}, (1, 1)),
        ({0: 1, 1: -11}, (1, -11)),
        ({0: 130, 1: 130}, (0, 130)),
        ({0: 130, 1: 1}, (1, 1)),
        ({0: LOST_PEERS, 1: LOST_PEERS}, (0, LOST_PEERS)),
        ({0: 2, 1: 2}, (0, 2)),
    ],
)
def test_a_rank_that_failed_by_itself_is_named_before_those_that_lost_it(
    codes: dict[int, int], named: tuple[int, int] | None
) -> None:
    for order in itertools.permutations(codes.items()):
        assert cause(dict(order)) == named


@pytest.mark.parametrize(
    ("error", "others", "lost"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), 1, True),
        (torch.distributed.DistNetworkError("the store does not answer"), 1, True),
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), 0, False),
        (RuntimeError("no rollout server is left"), 1, False),
    ],
)
def test_only_a_rank_with_others_can_lose_them(
    error: Exception, others: int, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error.__cause__ = RuntimeError("gloo/transport: the link to a server")  # no rank's, and not what failed
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1 + others)
    assert distributed.is_loss_of_peers(error) == lost


@pytest.mark.parametrize("seen_first", [0, 1])
def test_the_killed_rank_is_named_whichever_end_is_seen_first(seen_first: int) -> None:
    ranks = [Scripted(LOST_PEERS, after=2 * seen_first), Scripted(-9, after=2 * (1 - seen_first))]
    assert cause(watch(ranks, poll_s=0)) == (1, -9)


def test_ranks_that_are_left_are_asked_to_stop_then_killed_and_not_named() -> None:
    loading, stuck = Scripted(None, obeys=(signal.SIGTERM,)), Scripted(None)
    failed = Scripted(1, after=3)
    assert watch([stuck, loading, failed], grace_s=0.01, poll_s=0.001) == {2: 1}
    assert stuck.signals == [signal.SIGTERM, signal.SIGKILL]
    assert loading.signals == [signal.SIGTERM]
    assert failed.signals == []


def test_ranks_that_finish_are_left_alone() -> None:
    ranks = [Scripted(0, after=4), Scripted(0)]
    assert watch(ranks, grace_s=0, poll_s=0) == {0: 0, 1: 0}
    assert all(rank.signals == [] for rank in ranks)


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ({0: 0, 1: 0}, 0, ""),
        ({0: LOST_PEERS, 1: -9}, 1, "rlpost: rank 1 was ended by SIGKILL\n"),
        ({0: 0, 1: LOST_PEERS}, 1, "rlpost: rank 1 lost the other ranks\n"),
        ({0: 0, 1: 7}, 1, "rlpost: rank 1 was ended with exit code 7\n"),
        ({0: 2, 1: LOST_PEERS}, 2, ""),
        ({0: 130, 1: 130}, 130, ""),
    ],
)
def test_the_end_is_said_in_one_line(
    codes: dict[int, int], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunStatus(tmp_path)
    run.set_state("running", step=4)
    assert conclude(codes, run) == code
    assert capsys.readouterr().err == said
    killed = any(ended < 0 for ended in codes.values())
    status = run.status()
    assert (status["state"], status["step"]) == ("failed" if killed else "running", 4)
    assert status.get("error") == ("rank 1 was ended by SIGKILL" if killed else None)
