"""rlpost-compare on a step worked out by hand."""

import json
import math
from pathlib import Path

import pytest

from rlpost.config.schema import TrackingConfig
from rlpost.errors import UserError
from rlpost.objective.advantages import GroupAdvantage
from rlpost.objective.reducers import ConstantDivisor, SequenceMean, TokenMean
from rlpost.record.completions import load_rollouts
from rlpost.record.tracker import Tracker
from rlpost.sweep.compare import compare, make_arm, sentences
from tests.conftest import make_rollout
from tests.runs import command

CONFIG = """
name: small
run_dir: here
tracking: {experiment: small}
evaluation: {correct_function: null, correct_threshold: 1.0}
rollout: {max_tokens: 8}
algorithm: {mask_truncated: false}
reward: {number: {_target_: rlpost.rewards.number.NumberReward}}
task: {_target_: rlpost.data.tasks.Addition}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One group: a correct completion of 1 token, a wrong one of 4, and one that a filter left out."""
    rollouts = [make_rollout(completion=[4], reward=1.0), make_rollout(completion=[5] * 4, reward=0.0)]
    rollouts.append(make_rollout(1, reward=0.0))
    for rollout in rollouts:
        rollout.rewards = {"number": rollout.reward}
    rollouts[2].is_trained_on = False
    Tracker(tmp_path, None, TrackingConfig()).log(3, {}, rollouts)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_scale_cosine_and_shares_by_hand(run: Path) -> None:
    """c = A w with A = 1/2, -1/2: grpo 1/4 and 4 times -1/16; drgrpo(10) 1/40 and 4 times -1/40."""
    advantage = GroupAdvantage("none")
    arms = {"grpo": (advantage, SequenceMean()), "drgrpo": (advantage, ConstantDivisor(10))}
    rollouts = load_rollouts(run, 3)
    assert len(rollouts) == 2
    grpo, drgrpo = compare(rollouts, arms, 8, [True, False])
    assert (grpo.scale, grpo.norm, grpo.cosine) == pytest.approx((1, 1, 1))
    assert drgrpo.scale == pytest.approx((5 / 40) / (1 / 2))
    assert drgrpo.norm == pytest.approx((math.sqrt(5) / 40) / math.sqrt(1 / 16 + 4 / 256))
    assert drgrpo.cosine == pytest.approx(0.8)
    assert (grpo.correct, drgrpo.correct) == pytest.approx((1 / 2, 1 / 5))
    assert grpo.by_length["short"] == pytest.approx(1 / 2)
    assert sum(drgrpo.by_length.values()) == pytest.approx(1)
    (sentence,) = sentences([grpo, drgrpo])
    assert sentence.startswith("drgrpo has 0.25 times the policy gradient of grpo")
    assert "counts 4 times as much" in sentence


def test_completions_that_the_run_masked_have_no_weight(run: Path) -> None:
    """The long completion is masked: the token mean counts the other one's single token, at which c = 1/2."""
    rollouts = load_rollouts(run, 3)
    arms = {"mean": (GroupAdvantage("none"), TokenMean())}
    (masked,) = compare(rollouts, arms, 8, [True, False], [True, False])
    (whole,) = compare(rollouts, arms, 8, [True, False])
    assert masked.coefficients.tolist() == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert whole.coefficients.tolist() == pytest.approx([0.1, -0.1, -0.1, -0.1, -0.1])
    assert (masked.correct, whole.correct) == pytest.approx((1.0, 0.2))


def test_the_command_prints_and_writes(run: Path) -> None:
    arms = ["--arms", "drgrpo/grpo", "drgrpo/drgrpo:divisor=10"]
    result = command("rlpost.commands.compare", str(run), "--step", "3", *arms)
    assert result.returncode == 0, result.stderr
    assert "drgrpo/drgrpo:divisor=10" in result.stdout
    rows = json.loads((run / "compare" / "step-000003.json").read_text())
    assert rows[1]["cosine"] == pytest.approx(0.8)
    assert (run / "compare" / "step-000003.png").stat().st_size > 10_000
    assert (run / "compare" / "step-000003.csv").read_text().startswith("arm,scale,norm,cosine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "9"], r"no completions of step 9; it has steps 3\.\.3"),
        (["--step", "3", "--arms", "grpo"], "expected ALGORITHM/REDUCER"),
        (["--step", "3", "--arms", "grpoo/grpo"], "did you mean 'grpo'"),
        (["--step", "3", "--arms", "grpo/drgrpo:divizor=3"], "did you mean 'divisor'"),
    ],
)
def test_what_is_wrong_is_one_line(run: Path, arguments: list[str], message: str) -> None:
    result = command("rlpost.commands.compare", str(run), *arguments)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    import re

    assert re.search(message, result.stderr)


def test_arms_are_groups_choices() -> None:
    advantage, reducer = make_arm("drgrpo/drgrpo:divisor=64")
    assert advantage == GroupAdvantage("none")
    assert reducer == ConstantDivisor(64)
    with pytest.raises(UserError):
        make_arm("drgrpo/nothing")
