"""The real network under FSDP2: layouts, micro-batches, mini-batches, and what stops a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost import distributed
from rlpost.config.schema import AlgorithmConfig, KLConfig, TrainerConfig
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.objective.losses import ClippedLoss
from rlpost.objective.objective import Objective
from rlpost.objective.reducers import ConstantDivisor, Reducer, SequenceMean, TokenMean
from rlpost.trainer import model as trainer_model
from rlpost.trainer.model import PolicyModel
from rlpost.trainer.optimizer import AdamW, make_scheduler
from rlpost.trainer.policy import EngineMismatchError, Policy
from rlpost.types import PackedBatch, Rollout
from tests.conftest import make_rollout

pytestmark = pytest.mark.usefixtures("process_group")


ADAMW = AdamW(lr=1e-3)
UNCLIPPED = AdamW(lr=1e-3, max_grad_norm=None)


def rollouts(num_groups: int = 4, num_samples: int = 3) -> list[Rollout]:
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 200, (count,), generator=generator).tolist()

    made = []
    for group in range(num_groups):
        prompt = ids(4 + group)
        for sample in range(num_samples):
            completion = ids(2 + (group + 2 * sample) % 5)
            made.append(
                make_rollout(group, prompt, completion, sample_index=sample, advantage=1.0 - sample + 0.1 * group)
            )
    return made


def make_policy(
    directory: Path,
    *,
    temperature: float = 1.0,
    checkpointing: bool = False,
    precision: str = "float32",
    layout: str = "shared_prefix",
    optimizer: AdamW = ADAMW,
    objective: Objective | None = None,
    reference: PolicyModel | None = None,
    **settings: Any,
) -> Policy:
    trainer = TrainerConfig(precision=precision, activation_checkpointing=checkpointing)
    policy_model = sharded(trainer_model.load(directory, layout), trainer, SamplingDistribution(temperature))
    return policy_of(policy_model, objective or Objective(), optimizer, reference, **settings)


def sharded(
    language_model: torch.nn.Module,
    trainer: TrainerConfig | None = None,
    distribution: SamplingDistribution = SamplingDistribution(),  # noqa: B008 - it is frozen
) -> PolicyModel:
    return trainer_model.shard(language_model, distribution, distributed.sharding_mesh(), trainer or TrainerConfig())


def policy_of(
    policy_model: PolicyModel,
    objective: Objective,
    optimizer: AdamW = ADAMW,
    reference: Any = None,
    micro_batch_tokens: int = 2048,
    max_logprob_diff: float | None = None,
    **algorithm: Any,
) -> Policy:
    return Policy(
        policy_model,
        reference,
        objective,
        optimizer(policy_model.parameters(), 10),
        AlgorithmConfig(**algorithm),
        micro_batch_tokens=micro_batch_tokens,
        max_completion_tokens=8,
        max_logprob_diff=max_logprob_diff,
        seed=0,
    )


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in policy.named_weights()}


def groups(made: list[Rollout]) -> list[int]:
    return sorted({r.prompt.group_id for r in made})


@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
def test_logprobs_equal_the_plain_model(layout: str, tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir, temperature=0.7, layout=layout)
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    made = rollouts()
    for index, logprobs in enumerate(policy.logprobs(made)):
        prompt, completion = made[index].prompt.token_ids, made[index].completion.token_ids
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1)[range(len(completion)), list(completion)]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 40},
        {"layout": "padded"},
        {"checkpointing": True},
    ],
)
def test_an_update_does_not_depend_on_how_it_is_cut(change: dict[str, object], tiny_dir: Path) -> None:
    made = rollouts()
    results = []
    for settings in ({}, change):
        policy = make_policy(tiny_dir, optimizer=UNCLIPPED, **settings)
        metrics = policy.update(made, groups(made), step=1)
        metrics.pop("train/tokens_per_s")
        results.append((metrics, weights(policy)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
    for name, weight in results[0][1].items():
        # AdamW's first step is lr * sign(gradient): where a gradient is all but zero its rounding may show.
        close = torch.isclose(results[1][1][name], weight, rtol=0, atol=2e-5).float().mean()
        assert close > 0.999, name


def with_replies(made: list[Rollout]) -> list[Rollout]:
    """As if every second token, from the second on, were a reply's."""
    for rollout in made:
        sampled = tuple(i % 2 == 0 for i in range(len(rollout.completion.token_ids)))
        object.__setattr__(rollout.completion, "sampled_mask", sampled)
    return made


@pytest.mark.parametrize("reducer", [SequenceMean(), ConstantDivisor(7), TokenMean()])
def test_replies_are_context_and_have_no_gradient(reducer: Reducer, tiny_dir: Path) -> None:
    """Against the gradient of the sum over sampled tokens, written out with the plain model."""
    made = with_replies(rollouts())
    policy = make_policy(tiny_dir, optimizer=AdamW(lr=1e-3, max_grad_norm=1e9), objective=Objective(reducer=reducer))
    caught: dict[str, torch.Tensor] = {}

    def step() -> dict[str, float]:
        caught.update((n, p.grad.clone()) for n, p in policy.model.named_parameters())
        return {}

    policy.optimizer.step = step
    policy.update(made, groups(made), step=1)

    plain = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    num_tokens = sum(sum(r.completion.sampled_mask) for r in made)
    for rollout in made:
        prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
        mask = torch.tensor(rollout.completion.sampled_mask)
        logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(completion)), list(completion)]
        weight = {
            SequenceMean: 1 / (len(made) * int(mask.sum())),
            ConstantDivisor: 1 / (len(made) * 7),
            TokenMean: 1 / num_tokens,
        }[type(reducer)]
        (-rollout.advantage * weight * logprobs[mask].sum()).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(caught[f"language_model.{name}"], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("change", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"layout": "padded"}])
def test_with_replies_too_an_update_does_not_depend_on_how_it_is_cut(change: dict[str, object], tiny_dir: Path) -> None:
    results = []
    for settings in ({}, change):
        made = with_replies(rollouts())
        policy = make_policy(tiny_dir, optimizer=UNCLIPPED, top_entropy_share=0.5, **settings)
        metrics = policy.update(made, groups(made), step=1)
        metrics.pop("train/tokens_per_s")
        results.append(metrics)
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"num_epochs": 2}, {"micro_batch_tokens": 40}])
def test_rollouts_learn_the_trainers_logprobs_from_before(settings: dict[str, object], tiny_dir: Path) -> None:
    made = rollouts()
    made[0].advantage = made[1].advantage = made[2].advantage = 0.0  # a group without a gradient too
    policy = make_policy(tiny_dir, **settings)
    before = policy.logprobs(made)
    policy.update(made, groups(made), step=1)
    for index, rollout in enumerate(made):
        assert rollout.trainer_logprobs.tolist() == pytest.approx(before[index].tolist(), abs=1e-5)


def test_the_update_raises_good_and_lowers_bad_tokens(tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir)
    made = rollouts()
    before = policy.logprobs(made)
    policy.update(made, groups(made), step=1)
    after = policy.logprobs(made)
    gain = sum((after[i] - before[i]).mean().item() * r.advantage for i, r in enumerate(made))
    assert gain > 0


def test_mini_batches_and_epochs_take_old_logprobs_from_before_the_first(tiny_dir: Path) -> None:
    made = rollouts()
    policy = make_policy(tiny_dir, num_mini_batches=2, num_epochs=2)
    metrics = policy.update(made, groups(made), step=1)
    assert policy.optimizer.state_dict()["last_epoch"] == 4
    assert metrics["policy/ratio_max"] > 1.001  # later optimizer steps are off-policy
    on_policy = make_policy(tiny_dir).update(made, groups(made), step=1)
    assert on_policy["policy/ratio_max"] == 1.0
    # The engine is compared with the policy that sampled, not with the one being updated.
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(on_policy["rollout/logprob_diff_max"], abs=1e-5)


def test_a_temperature_is_in_every_logprob(tiny_dir: Path) -> None:
    """At temperature 0.6 an on-policy step has ratio 1, and what the tempered engine reports is what the trainer has."""
    policy = make_policy(tiny_dir, temperature=0.6, num_epochs=2)
    made = rollouts()
    scored = policy.logprobs(made)
    reported = [
        make_rollout(
            r.prompt.group_id,
            r.prompt.token_ids,
            r.completion.token_ids,
            advantage=0.0,
            logprobs=scored[i].tolist(),
        )
        for i, r in enumerate(made)
    ]
    metrics = policy.update(reported, groups(made), step=1)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["rollout/logprob_diff_max"] < 1e-5


def test_adamw_takes_the_divisor_away(tiny_dir: Path) -> None:
    """Without clipping and KL, AdamW's step m / sqrt(v) does not change when all gradients are scaled.

    With eps = 1e-30 nothing but float64 rounding is left (1e-9 over five steps of 1e-3). With the usual eps = 1e-8 the
    smaller gradients of divisor 1024 come closer to it: the paths part by a share of the step's length, not more.
    """
    made = rollouts()

    def path(divisor: float, eps: float) -> torch.Tensor:
        objective = Objective(reducer=ConstantDivisor(divisor))
        optimizer = AdamW(lr=1e-3, eps=eps, max_grad_norm=None)
        policy = policy_of(sharded(trainer_model.load(tiny_dir).double()), objective, optimizer)
        for step in range(5):
            policy.update(made, groups(made), step)
        return torch.cat([w.flatten() for w in weights(policy).values()])

    torch.testing.assert_close(path(64, 1e-30), path(1024, 1e-30), rtol=0, atol=1e-9)
    apart = (path(64, 1e-8) - path(1024, 1e-8)).abs()
    assert apart.max() < 5 * 1e-3
    assert apart.mean() < 1e-4


class Undeclared(ClippedLoss):
    """The same loss, which does not say that nothing comes of an advantage of 0."""

    zero_at_zero_advantage = False


def in_float64(directory: Path, objective: Objective, **settings: Any) -> Policy:
    return policy_of(sharded(trainer_model.load(directory).double()), objective, micro_batch_tokens=30, **settings)


def count_backward(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Group counts of the micro-batches that go through the model with a gradient, as they come."""
    seen: list[int] = []
    forward = policy.model.forward

    def counting(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            seen.append(len(batch.groups))
        return forward(batch)

    monkeypatch.setattr(policy.model, "forward", counting)
    return seen


@pytest.mark.parametrize("idle", [{1, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("settings", [{}, {"num_mini_batches": 2, "num_epochs": 2}])
def test_groups_of_advantage_zero_need_no_backward_pass(
    idle: set[int], settings: dict[str, int], tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics and, over three updates with the optimizer's momentum, weights are those of the whole update."""
    made = rollouts()
    results = []
    for loss in (ClippedLoss(), Undeclared()):
        policy = in_float64(tiny_dir, Objective(loss), **settings)
        policy.update(made, groups(made), step=1)
        for rollout in (quiet := rollouts()):
            if rollout.prompt.group_id in idle:
                rollout.advantage = 0.0
        seen = count_backward(policy, monkeypatch)
        metrics = [policy.update(quiet, groups(quiet), step) for step in (2, 3)]
        for each in metrics:
            each.pop("train/tokens_per_s")
        results.append((metrics, weights(policy), sum(seen)))
    (fast, fast_weights, fast_groups), (whole, whole_weights, whole_groups) = results
    for a, b in zip(fast, whole, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12, nan_ok=True)
    for name, weight in whole_weights.items():
        torch.testing.assert_close(fast_weights[name], weight, rtol=0, atol=1e-9)
    passes = 2 * settings.get("num_epochs", 1)
    assert fast_groups == passes * (4 - len(idle))
    assert whole_groups >= passes * 4


@pytest.mark.parametrize("term", [{"kl": KLConfig(coef=0.1)}, {"entropy_coef": 0.1}])
def test_a_term_that_pulls_on_every_group_leaves_none_out(
    term: dict[str, Any], tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = in_float64(tiny_dir, Objective(**term))
    seen = count_backward(policy, monkeypatch)
    made = rollouts()
    for rollout in made:
        rollout.advantage = 0.0
    policy.update(made, groups(made), step=1)
    assert sum(seen) >= 4


def test_top_entropy_tokens_alone_give_a_policy_gradient(tiny_dir: Path) -> None:
    made = rollouts()
    policy = make_policy(tiny_dir, top_entropy_share=0.25)
    metrics = policy.update(made, groups(made), step=1)
    everything = torch.cat([r.entropy for r in made])
    count = -(-len(everything) // 4)
    assert sum(int(r.has_policy_gradient.sum()) for r in made) == count
    threshold = everything.sort(descending=True).values[count - 1]
    assert all(torch.equal(r.has_policy_gradient, r.entropy >= threshold) for r in made)
    assert 0.6 < metrics["objective/top_entropy_cut"] < 0.9


@pytest.mark.parametrize(("share", "kept"), [(0.07, 7), (0.071, 8), (0.29, 29), (1.0, 100)])
def test_the_share_of_top_entropy_tokens_is_a_decimal_fraction(share: float, kept: int, tiny_dir: Path) -> None:
    """0.07 * 100 is over 7 in floating point; 7 tokens are kept all the same."""
    made = [make_rollout(g, completion=list(range(10, 35)), advantage=1.0 - g) for g in range(4)]
    made = [replace(r, prompt=replace(r.prompt, token_ids=(5 + i, 9, 20 + i))) for i, r in enumerate(made)]
    make_policy(tiny_dir, top_entropy_share=share).update(made, groups(made), step=1)
    assert len(torch.cat([r.entropy for r in made]).unique()) == 100
    assert sum(int(r.has_policy_gradient.sum()) for r in made) == kept


def test_the_reference_can_follow_the_policy(tiny_dir: Path) -> None:
    made = rollouts()
    reference = sharded(trainer_model.load(tiny_dir))
    objective = Objective(ClippedLoss(), kl=KLConfig(coef=0.1, reference_every=2, reference_mix=0.5))
    policy = make_policy(tiny_dir, reference=reference, objective=objective)
    start = [distributed.full(p).clone() for p in reference.parameters()]
    policy.update(made, groups(made), step=1)
    assert all(torch.equal(distributed.full(p), s) for p, s in zip(reference.parameters(), start, strict=True))
    policy.update(made, groups(made), step=2)
    for p, s, w in zip(reference.parameters(), start, weights(policy).values(), strict=True):
        torch.testing.assert_close(distributed.full(p), (s + w) / 2)


def test_the_kl_of_a_sequence_is_its_log_ratio(tiny_dir: Path) -> None:
    reference = sharded(trainer_model.load(tiny_dir))
    policy = make_policy(tiny_dir, reference=reference)
    made = rollouts()
    assert policy.sequence_kl(made) == pytest.approx([0.0] * len(made), abs=1e-5)
    policy.update(made, groups(made), step=1)
    pairs = zip(policy.logprobs(made), policy.reference_logprobs(made), strict=True)
    expected = [(ours - theirs).sum().item() for ours, theirs in pairs]
    assert policy.sequence_kl(made) == pytest.approx(expected, abs=1e-6)
    assert max(map(abs, expected)) > 1e-3


def test_the_gradients_scale_is_reported_against_grpo(tiny_dir: Path) -> None:
    """All completions of length 4: drgrpo with divisor 64 has 4 / 64 of grpo's weight."""
    made = [make_rollout(g, completion=[4, 5, 6, 7], advantage=1.0 - g) for g in range(3)]
    metrics = make_policy(tiny_dir, objective=Objective(reducer=ConstantDivisor(64))).update(made, [0, 1, 2], 1)
    assert metrics["objective/pg_scale"] == pytest.approx(4 / 64)


def test_fewer_groups_than_mini_batches(tiny_dir: Path) -> None:
    made = rollouts(num_groups=2)
    policy = make_policy(tiny_dir, num_mini_batches=3)
    policy.update(made, groups(made), step=1)
    assert policy.optimizer.state_dict()["last_epoch"] == 2


def test_an_engine_that_disagrees_stops_the_run_before_any_change(tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir, max_logprob_diff=0.01)
    made = rollouts()
    before = weights(policy)
    with pytest.raises(EngineMismatchError, match=r"rollout/logprob_diff_max=.* is over rollout.max_logprob_diff=0.01"):
        policy.update(made, groups(made), step=1)
    for name, weight in weights(policy).items():
        assert torch.equal(weight, before[name])


def test_a_nan_logprob_of_the_engine_stops_the_run(tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir, max_logprob_diff=1e9)
    bad = [make_rollout(0, completion=[4], logprobs=[float("nan")], advantage=1.0)]
    with pytest.raises(EngineMismatchError):
        policy.update(bad, [0], step=1)


def test_a_gradient_that_is_not_finite_stops_the_run_before_any_change(tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir)
    bad = [make_rollout(0, completion=[4], advantage=float("inf"))]
    before = weights(policy)
    with pytest.raises(FloatingPointError, match="diverged"):
        policy.update(bad, [0], step=1)
    for name, weight in weights(policy).items():
        assert torch.equal(weight, before[name])


def test_weights_that_are_not_numbers_are_a_divergence_and_not_the_engines_fault(tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir, max_logprob_diff=1e9)
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="a log-probability is not a number: the run has diverged"):
        policy.update(rollouts(), groups(rollouts()), step=1)


def test_truncated_completions_can_be_masked(tiny_dir: Path) -> None:
    made = [make_rollout(0, completion=[4, 5], advantage=1.0, finish_reason="length")]
    policy = make_policy(tiny_dir, mask_truncated=True)
    before = weights(policy)
    metrics = policy.update(made, [0], step=1)
    assert metrics["policy/loss"] == 0.0
    assert metrics["policy/grad_norm"] == 0.0
    assert all(torch.equal(w, before[n]) for n, w in weights(policy).items())


def test_the_reference_pulls_back(tiny_dir: Path) -> None:
    reference = sharded(trainer_model.load(tiny_dir))
    objective = Objective(ClippedLoss(), kl=KLConfig(coef=0.1))
    policy = make_policy(tiny_dir, reference=reference, objective=objective)
    made = rollouts()
    first = policy.update(made, groups(made), step=1)
    assert first["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert policy.update(made, groups(made), step=2)["policy/kl_ref"] > 1e-5


def test_the_kl_can_be_measured_without_a_term_in_the_loss(tiny_dir: Path) -> None:
    reference = sharded(trainer_model.load(tiny_dir))
    measuring, plain = make_policy(tiny_dir, reference=reference), make_policy(tiny_dir)
    made = rollouts()
    for step in (1, 2):
        measured = measuring.update(made, groups(made), step=step)
        alone = plain.update(made, groups(made), step=step)
        assert measured["policy/loss"] == alone["policy/loss"]
        assert measured["policy/grad_norm"] == alone["policy/grad_norm"]
        assert "policy/kl_ref" not in alone
    assert measured["policy/kl_ref"] > 1e-5
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(measuring)[name])


def test_gradient_clipping_reports_the_norm_before(tiny_dir: Path) -> None:
    made = rollouts()
    norms = [
        make_policy(tiny_dir, optimizer=AdamW(lr=1e-3, max_grad_norm=b)).update(made, groups(made), 1)[
            "policy/grad_norm"
        ]
        for b in (None, 1e-3)
    ]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-3


def test_bfloat16_computes_in_bf16_and_keeps_float32_weights(tiny_dir: Path) -> None:
    made = rollouts()
    policy = make_policy(tiny_dir, precision="bfloat16")
    metrics = policy.update(made, groups(made), step=1)
    assert {w.dtype for w in weights(policy).values()} == {torch.float32}
    exact = make_policy(tiny_dir).update(made, groups(made), step=1)
    assert metrics["policy/entropy"] != exact["policy/entropy"]
    assert metrics["policy/entropy"] == pytest.approx(exact["policy/entropy"], rel=0.02)


def test_schedules() -> None:
    def rates(schedule: str) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter], lr=1.0)
        scheduler = make_scheduler(optimizer, schedule, warmup_steps=2, num_steps=6)
        seen = []
        for _ in range(6):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return seen

    assert rates("constant") == [0, 0.5, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
    assert rates("cosine") == pytest.approx([0, 0.5, 1, 0.853553, 0.5, 0.146447], abs=1e-5)


def test_norms_and_biases_are_not_decayed(tiny_dir: Path) -> None:
    policy = make_policy(tiny_dir)
    optimizer = AdamW(weight_decay=0.1)(policy.model.parameters(), 1)
    decayed, kept = optimizer.torch_optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 1 for p in kept["params"])
    assert len(kept["params"]) == 2 * 2 + 1  # two norms a block, one at the end
