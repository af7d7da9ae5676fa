"""The loop's own decisions, with a scripted engine and reward: filters, refills, advantages over ranks' shares."""

import logging
import math
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.config.schema import CheckpointConfig, EvaluationConfig, StepConfig
from rlpost.data.stream import PromptStream
from rlpost.evaluate import Correctness
from rlpost.loop import Interrupted, Loop
from rlpost.objective.advantages import GroupAdvantage
from rlpost.record.progress import StepProgress
from rlpost.record.recorder import Recorder as StepRecorder
from rlpost.rewards.combine import RewardSum
from rlpost.rollout.engine import Sampling
from rlpost.rollout.filters import SoftOverlongPenalty, VariedRewards
from rlpost.rollout.sampler import Sampler
from rlpost.trainer.advantages import StepAdvantages
from rlpost.types import Completion, Example, Prompt, Rollout

pytestmark = pytest.mark.usefixtures("process_group")


class Scripted:
    """An engine whose completions are the prompt's script, and which knows no weights but their version."""

    version = 0

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        turn: dict[int, int] = {}
        for place, prompt in enumerate(prompts):
            i = turn[prompt.group_id] = turn.get(prompt.group_id, -1) + 1
            text = prompt.text[i % len(prompt.text)]
            yield place, Completion((1,) * (i + 1), (0.0,) * (i + 1), text, "stop", policy_version=self.version)

    def load_weights(self, named_weights: Iterable[Any], version: int) -> None:
        time.sleep(0.01)  # a call that came too early would see the old version
        self.version = version

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


class Saved:
    """Stands for the checkpoints and keeps the last one."""

    def save(self, policy: Any, step: int, about: dict[str, Any], parts: dict[str, Any]) -> None:
        self.step, self.parts = step, pickle.loads(pickle.dumps(parts))

    def finish(self) -> None: ...


def digits(*, completions: list[str], **_: Any) -> list[float | None]:
    return [None if c == "?" else float(c) for c in completions]


def make_loop(scripts: list[str], per_step: int = 2, samples: int = 2, **settings: Any) -> tuple[Loop, Recorder]:
    prompts = [Prompt(Example((), None), (i,), script) for i, script in enumerate(scripts)]
    policy, steps = Recorder(), settings.pop("steps", 1)
    take = lambda name, default=None: settings.pop(name, default)  # noqa: E731
    reward = take("reward", RewardSum({"digits": digits}, {"digits": 1.0}))
    sampler = Sampler(
        PromptStream(prompts, seed=0),
        Scripted(),
        reward,
        Sampling(max_tokens=8),
        StepConfig(steps=steps, prompts_per_step=per_step, samples_per_prompt=samples),
        group_filter=take("group_filter"),
        reward_processing=take("reward_processing"),
        max_attempts=take("max_attempts", 1),
        staleness=take("staleness", 0),
    )
    advantage, kl = take("advantage", GroupAdvantage("none")), take("kl_in_reward", 0.0)
    advantages = StepAdvantages(advantage, policy, kl, take("reward_weights"))
    loop = Loop(
        sampler,
        advantages,
        policy,
        take("evaluator"),
        Saved(),
        StepRecorder(None, StepProgress(steps, enabled=False), Correctness("digits")),
        steps,
        take("evaluation", EvaluationConfig(at_end=False)),
        take("checkpoint", CheckpointConfig()),
        stop_requested=lambda: False,
    )
    assert not settings
    return loop, policy


def step(loop: Loop) -> list[Rollout]:
    loop._one_step(1)
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
    loop.recorder.tracker = SimpleNamespace(log=lambda step, metrics, rollouts: logged.append(metrics))
    loop.recorder.progress = SimpleNamespace(phase=lambda *_: None, step=lambda *_: None)
    loop._one_step(1)
    assert [metrics["rollout/servers"] for metrics in logged] == [2.0]


def test_dynamic_sampling_refills_until_the_step_is_full() -> None:
    loop, _ = make_loop(["11"] * 3 + ["10"] * 3, per_step=3, group_filter=VariedRewards(), max_attempts=10)
    batch = loop.sampler.next_batch(1)
    sampled, kept_ids, metrics = batch.rollouts, batch.group_ids, batch.metrics
    kept = [r for r in sampled if r.is_trained_on]
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
    loop, _ = make_loop(["111"], per_step=1, samples=3, reward_processing={"overlong": SoftOverlongPenalty(3, 1 / 3)})
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
    loop, _ = make_loop(["10"], per_step=1, reward=reward, reward_weights=[1.0, 1.0], advantage=GroupAdvantage(eps=0))
    assert [r.advantage for r in step(loop)] == pytest.approx([0.0, 0.0])
    loop, _ = make_loop(["10"], per_step=1, reward=reward, advantage=GroupAdvantage(eps=0))
    assert [r.advantage for r in step(loop)] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def run(loop: Loop) -> None:
    loop.run()


def trained(policy: Recorder) -> list[list[tuple[str, int]]]:
    """By update: what was trained on, without the version that sampled it."""
    return [[(r.prompt.text, r.prompt.group_id) for r in rollouts] for rollouts, _ in policy.updates]


@pytest.mark.parametrize("staleness", [0, 1, 2, 9])
def test_steps_are_sampled_by_the_weights_of_so_many_steps_before(staleness: int) -> None:
    scripts = ["10", "12", "13", "14", "20", "21"]
    loop, policy = make_loop(scripts, steps=6, staleness=staleness, checkpoint=CheckpointConfig(at_end=False))
    run(loop)
    versions = [{r.completion.policy_version for r in rollouts} for rollouts, _ in policy.updates]
    assert versions == [{max(0, step - 1 - staleness)} for step in range(1, 7)]
    on_policy, expected = make_loop(scripts, steps=6, checkpoint=CheckpointConfig(at_end=False))
    run(on_policy)
    assert trained(policy) == trained(expected)
    assert loop.sampler.state_dict()["ahead"] == [{}]


def test_an_evaluation_is_of_the_newest_weights() -> None:
    seen = []
    loop, _ = make_loop(
        ["10"] * 4,
        steps=4,
        staleness=2,
        evaluation=EvaluationConfig(every=2, at_end=False),
        evaluator=lambda step: record(step),
    )

    def record(step: int) -> dict[str, float]:
        (rollout,) = loop.sampler.sample_held_out(
            [Prompt(Example((), None), (0,), "1")], 1, Sampling(max_tokens=8), step
        )
        seen.append((loop.step, rollout.completion.policy_version))
        return {}

    run(loop)
    assert seen == [(2, 2), (4, 4)]


@pytest.mark.parametrize("within", [False, True])
def test_what_was_sampled_ahead_is_in_the_checkpoint(within: bool) -> None:
    """A run that stops after its second step, or within its third, goes on with the very rollouts it had."""
    scripts = ["10", "12", "13", "14", "20", "21"]
    whole, expected = make_loop(scripts, steps=6, staleness=2)
    run(whole)

    loop, first = make_loop(scripts, steps=6, staleness=2)
    loop.stop_requested = lambda: 5 in loop.sampler._ahead if within else len(first.updates) == 2
    with pytest.raises(Interrupted):
        run(loop)
    saved = loop.checkpoints
    assert saved.step == 2
    (ahead,) = saved.parts["sampler"]["ahead"]
    assert sorted(ahead) == ([3, 4, 5] if within else [3, 4])

    resumed, second = make_loop(scripts, steps=6, staleness=2)
    resumed.restore(saved.step, saved.parts)
    run(resumed)
    assert trained(first) + trained(second) == trained(expected)
    versions = [{r.completion.policy_version for r in rollouts} for rollouts, _ in second.updates]
    assert versions == [{max(0, step - 3)} for step in range(3, 7)]


def test_weights_that_could_not_be_loaded_end_the_run() -> None:
    loop, _ = make_loop(["10"] * 4, steps=4, staleness=1)

    def fail(named_weights: Iterable[Any], version: int) -> None:
        raise RuntimeError("no server is left")

    loop.sampler._engine.load_weights = fail
    with pytest.raises(RuntimeError, match="no server is left"):
        run(loop)


class Halved:
    """Reward processing that remembers: every call halves the rewards, and counts."""

    calls = 0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        self.calls += 1
        return [rollout.reward / 2 for rollout in rollouts]

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_run_processes_rewards_once_and_with_the_state_they_had(staleness: int) -> None:
    scripts = ["10", "12", "13", "14"]

    def made() -> tuple[Loop, Recorder, Halved]:
        halved = Halved()
        loop, policy = make_loop(scripts, steps=5, staleness=staleness, reward_processing={"halved": halved})
        loop.hooks = {"halved": halved}
        return loop, policy, halved

    loop, first, _ = made()
    loop.stop_requested = lambda: len(first.updates) == 2
    with pytest.raises(Interrupted):
        run(loop)
    resumed, second, halved = made()
    resumed.restore(loop.checkpoints.step, loop.checkpoints.parts)
    run(resumed)
    assert [len(policy.updates) for policy in (first, second)] == [2, 3]
    assert halved.calls == 5
    for rollouts, _ in [*first.updates, *second.updates]:
        assert [r.reward for r in rollouts] == [r.rewards["digits"] / 2 for r in rollouts]
