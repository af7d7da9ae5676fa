"""The loop's own decisions, with a scripted engine and reward: filters, refills, advantages over ranks' shares."""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.data.stream import PromptStream
from rlpost.evaluate import Correctness
from rlpost.filters import SoftOverlongPenalty, VariedRewards
from rlpost.loop import Loop, LoopSettings
from rlpost.objective.advantages import GroupAdvantage
from rlpost.progress import StepProgress
from rlpost.rewards.combine import RewardSum
from rlpost.rollout.engine import Sampling
from rlpost.types import Completion, Example, Prompt, Rollout

pytestmark = pytest.mark.usefixtures("process_group")


class Scripted:
    """An engine whose completions are the prompt's script, and which knows no weights."""

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        turn: dict[int, int] = {}
        for place, prompt in enumerate(prompts):
            i = turn[prompt.group_id] = turn.get(prompt.group_id, -1) + 1
            text = prompt.text[i % len(prompt.text)]
            yield place, Completion((1,) * (i + 1), (0.0,) * (i + 1), text, "stop")

    def load_weights(self, named_weights: Iterable[Any], version: int) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"servers": 2.0}

    def close(self) -> None: ...


class Recorder:
    """Stands for the policy and keeps what it was given."""

    def __init__(self) -> None:
        self.updates: list[tuple[list[Rollout], list[int]]] = []

    def update(self, rollouts: list[Rollout], group_ids: list[int], step: int) -> dict[str, float]:
        self.updates.append((rollouts, group_ids))
        return {}

    def named_weights(self) -> list[Any]:
        return []

    def sequence_kl(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [float(len(r.completion.token_ids)) for r in rollouts]


def digits(*, completions: list[str], **_: Any) -> list[float | None]:
    return [None if c == "?" else float(c) for c in completions]


def make_loop(scripts: list[str], per_step: int = 2, samples: int = 2, **settings: Any) -> tuple[Loop, Recorder]:
    prompts = [Prompt(Example((), None), (i,), script) for i, script in enumerate(scripts)]
    policy = Recorder()
    extra = {k: settings.pop(k) for k in ("group_filter", "reward_processing", "advantage", "reward") if k in settings}
    loop = Loop(
        **{"reward": RewardSum({"digits": digits}, {"digits": 1.0}), "advantage": GroupAdvantage("none"), **extra},
        stream=PromptStream(prompts, seed=0),
        engine=Scripted(),
        policy=policy,
        evaluator=None,
        correct=Correctness("digits"),
        sampling=Sampling(max_tokens=8),
        checkpoints=None,
        settings=LoopSettings(
            steps=1, prompts_per_step=per_step, samples_per_prompt=samples, seed=0, eval_at_end=False, **settings
        ),
        tracker=None,
        stop_requested=lambda: False,
    )
    return loop, policy


def step(loop: Loop) -> list[Rollout]:
    loop._one_step(1, StepProgress(1, 0, enabled=False))
    ((rollouts, _),) = loop.policy.updates
    return rollouts


def test_without_a_filter_every_group_is_trained_on() -> None:
    loop, policy = make_loop(["11", "10"])
    rollouts = step(loop)
    assert len(rollouts) == 4
    assert policy.updates[0][1] == [0, 1]
    by_text = {r.prompt.text: [] for r in rollouts}
    for r in rollouts:
        by_text[r.prompt.text].append(r.advantage)
    assert by_text == {"11": [0.0, 0.0], "10": [0.5, -0.5]}


def test_what_the_engine_says_of_itself_is_reported() -> None:
    logged: list[dict[str, float]] = []
    loop, _ = make_loop(["11", "10"])
    loop.tracker = SimpleNamespace(log=lambda step, metrics, rollouts: logged.append(metrics))
    loop._one_step(1, SimpleNamespace(phase=lambda *_: None, step=lambda *_: None))
    assert [metrics["rollout/servers"] for metrics in logged] == [2.0]


def test_dynamic_sampling_refills_until_the_step_is_full() -> None:
    loop, _ = make_loop(["11"] * 3 + ["10"] * 3, per_step=3, group_filter=VariedRewards(), max_attempts=10)
    sampled, kept_ids, metrics = loop._sample(1, {}, StepProgress(1, 0, enabled=False))
    kept = [r for r in sampled if r.kept]
    assert len(kept_ids) == 3
    assert {r.prompt.text for r in kept} == {"10"}
    assert {r.prompt.group_id for r in kept} == set(kept_ids)
    assert metrics["sampling/gave_up"] == 0
    assert metrics["sampling/attempts"] >= 2
    assert metrics["sampling/filtered_groups"] == len({r.prompt.group_id for r in sampled}) - 3


def test_it_says_when_it_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = make_loop(["11", "11", "11", "10"], per_step=3, group_filter=VariedRewards(), max_attempts=1)
    with caplog.at_level(logging.WARNING):
        rollouts = step(loop)
    drawn_well = any(r.prompt.text == "10" for r in rollouts)
    assert "groups passed the filter within 1 attempts" in caplog.text
    assert ({r.prompt.text for r in rollouts} == {"10"}) if drawn_well else len(rollouts) == 6


def test_a_step_that_keeps_nothing_trains_on_everything(caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = make_loop(["11", "00"], group_filter=VariedRewards(), max_attempts=3)
    with caplog.at_level(logging.WARNING):
        rollouts = step(loop)
    assert "0 of 2 groups passed the filter within 3 attempts" in caplog.text
    assert len(rollouts) == 3 * 2 * 2
    assert {r.advantage for r in rollouts} == {0.0}


def test_a_row_where_every_function_says_none_has_advantage_zero() -> None:
    loop, _ = make_loop(["1?0"], per_step=1, samples=3)
    rollouts = step(loop)
    assert [r.advantage for r in rollouts] == [0.5, 0.0, -0.5]
    assert math.isnan(rollouts[1].reward)


def test_rewards_are_processed_before_advantages() -> None:
    """Completions of 1, 2, 3 tokens, reward 1 each; the last third of the limit costs up to 1."""
    loop, _ = make_loop(["111"], per_step=1, samples=3, reward_processing=[SoftOverlongPenalty(3, 1 / 3)])
    assert [r.advantage for r in step(loop)] == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_a_kl_in_the_reward_is_taken_off_before_advantages() -> None:
    loop, _ = make_loop(["11"], per_step=1, kl_in_reward=0.5)
    rollouts = step(loop)
    assert [r.reward for r in rollouts] == [0.5, 0.0]  # 1 - 0.5 * 1, 1 - 0.5 * 2
    assert [r.advantage for r in rollouts] == [0.25, -0.25]


def test_each_reward_can_be_normalised_by_itself() -> None:
    def thousands(*, completions: list[str], **_: Any) -> list[float | None]:
        return [1000.0 * (c == "0") for c in completions]

    reward = RewardSum({"digits": digits, "thousands": thousands}, {"digits": 1.0, "thousands": 1.0})
    loop, _ = make_loop(["10"], per_step=1, reward=reward, normalize_each_reward=True, advantage=GroupAdvantage(eps=0))
    assert [r.advantage for r in step(loop)] == pytest.approx([0.0, 0.0])
    loop, _ = make_loop(["10"], per_step=1, reward=reward, advantage=GroupAdvantage(eps=0))
    assert [r.advantage for r in step(loop)] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
