import math
from pathlib import Path

import pytest

from rlpost.config.schema import TrackingConfig
from rlpost.errors import UserError
from rlpost.evaluate import Correctness
from rlpost.record.metrics import rollout_metrics
from rlpost.record.progress import StepProgress
from rlpost.record.recorder import Recorder
from rlpost.record.tracker import Tracker
from tests.conftest import make_rollout


def test_by_hand() -> None:
    rollouts = [
        make_rollout(0, completion=[1, 2], reward=1.0),
        make_rollout(0, completion=[1, 2, 3, 4], reward=0.0, finish_reason="length"),
        make_rollout(1, completion=[1, 2, 3], reward=0.0),
        make_rollout(1, completion=[1], reward=0.0),
        make_rollout(2, completion=[1, 2], reward=math.nan),
        make_rollout(2, completion=[1, 2, 3], reward=math.nan),
    ]
    for rollout in rollouts:
        rollout.rewards = {"number": rollout.reward, "other": math.nan}
    rollouts[0].rewards["other"] = 3.0
    rollouts[1].reward_errors = {"other": "raised"}
    metrics = rollout_metrics(rollouts, lambda r: r.reward == 1.0)
    expected = {
        "reward/mean": 0.25,
        "reward/std": 0.5,
        "reward/number/mean": 0.25,
        "reward/number/std": 0.5,
        "reward/other/mean": 3.0,
        "reward/other/std": math.nan,
        "reward/zero_std_groups": 2 / 3,
        "reward/not_applicable": 2 / 6,
        "reward/errors": 1,
        "completions/length_mean": 2.5,
        "completions/length_min": 1,
        "completions/length_max": 4,
        "completions/length_terminated": 11 / 5,
        "completions/length_correct": 2.0,
        "completions/length_incorrect": 13 / 5,
        "completions/truncated": 1 / 6,
    }
    assert metrics == pytest.approx(expected, nan_ok=True)


@pytest.mark.usefixtures("process_group")
def test_further_metrics_stand_under_their_own_name(tmp_path: Path) -> None:
    def written(name: str) -> dict[str, float]:
        made = [make_rollout(reward=1.0), make_rollout(sample_index=1, reward=0.0)]
        for rollout in made:
            rollout.rewards = {"number": rollout.reward}
        tracker = Tracker(tmp_path / name, None, TrackingConfig())
        (tmp_path / name).mkdir()
        count = {name: lambda rollouts: {"mean": len(rollouts)}}
        recorder = Recorder(tracker, StepProgress(1, enabled=False), Correctness("number"), count)
        recorder.begin(1)
        recorder.add({"sampling": 1.0})
        recorder.end()
        shown = ("policy/entropy", "policy/grad_norm", "rollout/logprob_diff_max")
        recorder.step(made, [], dict.fromkeys(shown, 1.0))
        return tracker.summary()[0]

    assert written("repeats")["repeats/mean"] == 2
    with pytest.raises(
        UserError, match=r"metrics\.reward: reward/mean is a metric already; give metrics\.reward another"
    ):
        written("reward")
