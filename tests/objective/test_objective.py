"""The composed objective: worked numbers, and gradients and metrics that no split can change."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.config.schema import KLConfig
from rlpost.data.packing import empty_batch, pack, step_totals
from rlpost.objective.corrections import CorrectionOutput, ImportanceSampling, OffPolicySequenceMask
from rlpost.objective.losses import CISPOLoss, ClippedLoss, GSPOLoss, ReinforceLoss, SAPOLoss
from rlpost.objective.metrics import Mean, Metric, joined
from rlpost.objective.objective import Objective
from rlpost.objective.reducers import ConstantDivisor, FunctionReducer, SequenceMean, TokenMean, TokenSum
from rlpost.types import PackedBatch, Rollout, StepTotals
from tests.conftest import make_rollout

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "miles_reducer.py"
REDUCERS = {
    "grpo": SequenceMean(),
    "drgrpo": ConstantDivisor(7),
    "drgrpo_max_tokens": ConstantDivisor("max_tokens"),
    "token_mean": TokenMean(),
    "sum": TokenSum(),
    "function": FunctionReducer(f"{EXAMPLE}:get_pg_loss_reducer"),
    "function_per_token": FunctionReducer(f"{EXAMPLE}:get_pg_loss_reducer", calculate_per_token_loss=True),
}
LOSSES = {
    "clipped": ClippedLoss(0.2, 0.28),
    "dual_clip": ClippedLoss(0.2, 0.28, dual_clip=1.5, ratio_cap=1.6),
    "gspo": GSPOLoss(0.1, 0.1),
    "gspo_token": GSPOLoss(0.1, 0.1, variant="token"),
    "cispo": CISPOLoss(0.2, 0.3),
    "sapo": SAPOLoss(),
    "reinforce": ReinforceLoss(),
}
CORRECTIONS = {
    "token": ImportanceSampling(high=1.2),
    "sequence": ImportanceSampling("sequence", "mask", 0.5, 2.0),
    "geometric": ImportanceSampling("geometric", "truncate", 0.9, 1.1),
    "off_policy": OffPolicySequenceMask(0.05),
}


def test_objective_by_hand() -> None:
    """One token of ratio 1 and advantage 2, KL k1 of 0.5 with weight 0.1, entropy 3 with weight 0.01."""
    rollout = make_rollout(completion=[4], advantage=2.0, logprobs=[-1.25])
    (batch,) = pack([rollout], [True], 64)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.5], dtype=torch.float64))
    objective = Objective(kl=KLConfig(coef=0.1, estimator="k1"), entropy_coef=0.01)
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    out = objective(batch, logprobs, torch.tensor([3.0], dtype=torch.float64), StepTotals(1, 1, 8))
    assert out.loss.item() == pytest.approx(-2.0 + 0.1 * 0.5 - 0.01 * 3.0)
    assert out.metrics["policy/kl_ref"].value == pytest.approx(0.5)
    assert out.metrics["policy/entropy"].value == pytest.approx(3.0)
    assert out.metrics["rollout/logprob_diff_max"].value == pytest.approx(0.25)
    assert out.metrics["objective/pg_scale"] == Mean(2.0, 2.0)


def test_every_metric_by_hand() -> None:
    """Two completions of two tokens; ratios 1/2, 1 | 3/2, 1; advantages -1 and 1; engine off by 0.1, 0 | 0.3, 0."""
    made = [make_rollout(g, completion=[4, 5], advantage=a) for g, a in ((0, -1.0), (1, 1.0))]
    (batch,) = pack(made, [True, True], 64)
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    batch = replace(
        batch,
        old_logprobs=old,
        ref_logprobs=old + torch.tensor([0.0, 0.0, 0.0, -0.4]),
        rollout_logprobs=old + torch.tensor([0.1, 0.0, -0.3, 0.0]),
    )
    logprobs = old + torch.tensor([0.5, 1.0, 1.5, 1.0], dtype=torch.float64).log()
    objective = Objective(reducer=ConstantDivisor(8), kl=KLConfig(coef=0.5, estimator="k1"))
    out = objective(batch, logprobs, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), StepTotals(2, 4, 8))
    kl = (math.log(0.5) + math.log(1.5) + 0.4) / 4
    assert {name: metric.value for name, metric in out.metrics.items()} == pytest.approx(
        {
            "policy/loss": (0.8 + 1.0 - 1.2 - 1.0) / 16 + 0.5 * kl,
            "policy/entropy": 2.5,
            "policy/kl_ref": kl,
            "policy/ratio_mean": 1.0,
            "policy/clip_low": 0.25,
            "policy/clip_high": 0.25,
            "objective/pg_scale": 4 / 16,
            "rollout/logprob_diff_mean": 0.1,
            "policy/ratio_max": 1.5,
            "rollout/logprob_diff_max": 0.3,
        }
    )
    scale = out.metrics["objective/pg_scale"]
    assert isinstance(scale, Mean)
    assert (scale.total, scale.weight) == (pytest.approx(4 / 16), pytest.approx(1.0))


def test_a_correction_is_given_what_it_asks_for() -> None:
    seen: dict[str, object] = {}

    def spy(logprobs, old_logprobs, rollout_logprobs, advantages, tokens):  # type: ignore[no-untyped-def]
        seen.update(locals())
        return CorrectionOutput(torch.ones_like(logprobs), torch.zeros_like(logprobs, dtype=torch.bool))

    (batch,) = pack([make_rollout(completion=[4, 5], advantage=2.0, logprobs=[-3.0, -4.0])], [True], 64)
    batch = replace(batch, old_logprobs=torch.tensor([-1.5, -2.5]))
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    Objective(corrections={"spy": spy})(batch, logprobs, torch.ones(2), StepTotals(1, 2, 8))
    assert seen["logprobs"].tolist() == [-1.0, -2.0]
    assert not seen["logprobs"].requires_grad
    assert seen["old_logprobs"].tolist() == [-1.5, -2.5]
    assert seen["rollout_logprobs"].tolist() == [-3.0, -4.0]
    assert seen["advantages"].tolist() == [2.0, 2.0]
    assert seen["tokens"].loss_mask.tolist() == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_has_the_logprobs_precision(dtype: torch.dtype) -> None:
    (batch,) = pack([make_rollout(completion=[4], advantage=1.0)], [True], 64)
    batch = replace(batch, has_policy_gradient=torch.tensor([True]), ref_logprobs=torch.tensor([-1.0], dtype=dtype))
    objective = Objective(corrections=CORRECTIONS, kl=KLConfig(coef=0.1), entropy_coef=0.1)
    out = objective(batch, torch.tensor([-1.0], dtype=dtype), torch.ones(1, dtype=dtype), StepTotals(1, 1, 8))
    numbers = [number for metric in out.metrics.values() for number in vars(metric).values()]
    assert {out.loss.dtype, *(number.dtype for number in numbers)} == {dtype}


def test_corrections_and_the_kept_tokens_change_the_numerator_only() -> None:
    """Three tokens of advantage 1; w = 2, 1, 1 truncated at 1.5; the last token is not kept: (1.5 + 1 + 0) / 3."""
    (batch,) = pack(
        [make_rollout(completion=[4, 5, 6], advantage=1.0, logprobs=[-1 - math.log(2), -1, -1])], [True], 64
    )
    batch = replace(batch, has_policy_gradient=torch.tensor([True, True, False]))
    objective = Objective(corrections={"tis": ImportanceSampling(high=1.5)})
    logprobs = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    out = objective(batch, logprobs, torch.ones(3, dtype=torch.float64), StepTotals(1, 3, 8))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-2.5 / 3)
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -1 / 3, 0.0])
    assert out.metrics["objective/tis_cut"].value == pytest.approx(1 / 3)
    assert out.metrics["objective/top_entropy_cut"].value == pytest.approx(1 / 3)
    assert out.metrics["policy/entropy"].value == pytest.approx(1.0)


@pytest.mark.parametrize(("unbiased", "gradient"), [(False, 0.5), (True, math.log(2))])
def test_the_unbiased_kl_gradient(unbiased: bool, gradient: float) -> None:
    """k3 with d = ln 2: its own derivative is 1 - exp(-d) = 1/2; with the ratio it is k3 + 1/2 = d, that of KL itself."""
    (batch,) = pack([make_rollout(completion=[4], advantage=0.0)], [True], 64)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.0 - math.log(2)], dtype=torch.float64))
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    objective = Objective(kl=KLConfig(coef=1.0, unbiased=unbiased))
    out = objective(batch, logprobs, torch.zeros(1, dtype=torch.float64), StepTotals(1, 1, 8))
    out.loss.backward()
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert out.loss.item() == pytest.approx(math.log(2) - 0.5)


def test_the_unbiased_form_is_the_gradient_of_the_divergence() -> None:
    """Over all tokens of a small vocabulary, the expected gradient equals that of KL(p || q) by autograd."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)
    d = logp - q.log()
    per_token = (torch.expm1(-d) + d) * torch.exp(logp - logp.detach())
    (estimate,) = torch.autograd.grad((logp.detach().exp() * per_token).sum(), logits)
    torch.testing.assert_close(estimate, exact)


def test_kl_reducer_same_weighs_the_kl_like_the_policy_gradient() -> None:
    (batch,) = pack([make_rollout(completion=[4], advantage=0.0)], [True], 64)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.5], dtype=torch.float64))
    logprobs, entropy = torch.tensor([-1.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    losses = [
        Objective(reducer=ConstantDivisor(100), kl=KLConfig(coef=1.0, estimator="k1", reducer=r))(
            batch, logprobs, entropy, StepTotals(1, 1, 8)
        ).loss.item()
        for r in ("sequence_mean", "same")
    ]
    assert losses == pytest.approx([0.5, 0.005])


def test_masked_tokens_that_are_not_finite_change_nothing() -> None:
    rollouts = [make_rollout(0, completion=[4]), make_rollout(1, completion=[5], logprobs=[math.nan])]
    (batch,) = pack(rollouts, [True, False], 64)
    out = Objective()(batch, torch.tensor([-0.75, -math.inf]), torch.ones(2), StepTotals(2, 1, 8))
    assert math.isfinite(out.loss.item())
    assert all(math.isfinite(metric.value) for name, metric in out.metrics.items() if name != "objective/pg_scale")
    assert out.metrics["policy/ratio_max"].value == 1.0
    assert out.metrics["rollout/logprob_diff_max"].value == 0.25


def test_an_unmasked_nan_rollout_logprob_shows() -> None:
    (batch,) = pack([make_rollout(completion=[4], logprobs=[math.nan])], [True], 64)
    out = Objective()(batch, torch.tensor([-1.0]), torch.ones(1), StepTotals(1, 1, 8))
    assert math.isnan(out.metrics["rollout/logprob_diff_max"].value)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Rollout], list[bool], list[int]]:
    """Rollouts of a step, which of them are masked, and a split of them over simulated ranks."""
    rollouts: list[Rollout] = []
    for group in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
        for sample in range(draw(st.integers(1, 3))):
            completion = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
            advantage = draw(st.floats(-2, 2))
            rollouts.append(make_rollout(group, prompt, completion, sample_index=sample, advantage=round(advantage, 3)))
    kept = draw(st.lists(st.booleans(), min_size=len(rollouts), max_size=len(rollouts)))
    ranks = draw(st.lists(st.integers(0, 2), min_size=len(rollouts), max_size=len(rollouts)))
    return rollouts, kept, ranks


class TableModel:
    """A differentiable stand-in for the network: a token's logprob depends on its sequence and its place alone."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        generator = torch.Generator().manual_seed(0)

        def noise(size: float) -> torch.Tensor:
            return size * torch.randn(len(rollouts), 8, dtype=torch.float64, generator=generator)

        self.key = {id(r): i for i, r in enumerate(rollouts)}
        self.table = noise(1.0).requires_grad_()
        self.old = self.table.detach() + noise(0.3)
        self.ref = self.table.detach() + noise(0.3)
        self.rollout = self.old + noise(0.3)
        self.keep = noise(1.0) > -0.5

    def __call__(self, batch: PackedBatch, share: list[Rollout]) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        sequences = [self.key[id(share[i])] for i in batch.rollout_ids]
        rows = torch.tensor(sequences, dtype=torch.int64)[batch.sequence_index]
        at = (rows, batch.token_index)
        batch = replace(
            batch,
            old_logprobs=self.old[at],
            ref_logprobs=self.ref[at],
            rollout_logprobs=self.rollout[at],
            has_policy_gradient=self.keep[at],
        )
        return batch, self.table[at], self.table[at] ** 2


def total(
    rollouts: list[Rollout], kept: list[bool], ranks: list[int], budget: int, layout: str, objective: Objective
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient and metrics of a step split over ranks and micro-batches, an empty micro-batch on each rank."""
    model = TableModel(rollouts)
    shares = [[i for i, r in enumerate(ranks) if r == rank] for rank in range(3)]
    parts = [step_totals([rollouts[i] for i in s], [kept[i] for i in s], 8) for s in shares]
    totals = StepTotals(sum(p.num_sequences for p in parts), sum(p.num_tokens for p in parts), 8)
    metrics: list[dict[str, Metric]] = []
    for share in shares:
        mine = [rollouts[i] for i in share]
        for batch in [*pack(mine, [kept[i] for i in share], budget, layout), empty_batch(layout)]:
            out = objective(*model(batch, mine), totals)
            out.loss.backward()
            metrics.append(out.metrics)
    return model.table.grad, {name: metric.value for name, metric in joined(metrics).items()}


@settings(max_examples=8, deadline=None)
@given(step=steps(), budget=st.integers(1, 40), order=st.randoms())
@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_split_changes_gradients_or_metrics(
    loss: str,
    reducer: str,
    layout: str,
    step: tuple[list[Rollout], list[bool], list[int]],
    budget: int,
    order: object,
) -> None:
    rollouts, kept, ranks = step
    objective = Objective(
        LOSSES[loss],
        REDUCERS[reducer],
        CORRECTIONS,
        kl=KLConfig(coef=0.1, unbiased=True, reducer="same"),
        entropy_coef=0.01,
    )
    whole = total(rollouts, kept, [0] * len(rollouts), 10_000, "padded", objective)
    split = total(rollouts, kept, ranks, budget, layout, objective)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-10, atol=1e-12)
    assert split[1] == pytest.approx(whole[1], rel=1e-10, abs=1e-12, nan_ok=True)


EXTREME = st.one_of(st.floats(-1e4, 0), st.sampled_from([0.0, -88.0, -89.0, -1e4]))
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf, -1e4, 0.0])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_token_without_a_gradient_makes_one(loss: str, estimator: str, data: st.DataObject) -> None:
    """In float32, for log-probabilities down to -1e4: gradients are finite, and masked tokens' values never matter."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    made = [
        make_rollout(g, completion=[4] * n, sampled_mask=mask, advantage=data.draw(st.sampled_from([-1.0, 0.0, 2.0])))
        for g, (n, mask) in enumerate(zip(lengths, masks, strict=True))
    ]
    (batch,) = pack(made, [True] * len(made), 1000)
    active, size = batch.loss_mask, len(batch.loss_mask)

    def drawn(values: st.SearchStrategy[float]) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size)), dtype=torch.float32)

    kl = KLConfig(coef=0.04, estimator=estimator, unbiased=data.draw(st.booleans()))
    objective = Objective(LOSSES[loss], corrections=CORRECTIONS, kl=kl, entropy_coef=0.01, max_log_ratio=20.0)
    plain = [torch.where(active, drawn(EXTREME), -1.0) for _ in range(4)]

    def gradient(masked: list[torch.Tensor]) -> torch.Tensor:
        values = [torch.where(active, p, m) for p, m in zip(plain, masked, strict=True)]
        logprobs = values[0].clone().requires_grad_()
        filled = replace(batch, old_logprobs=values[1], ref_logprobs=values[2], rollout_logprobs=values[3])
        objective(filled, logprobs, torch.zeros(size), StepTotals(len(made), 8, 8)).loss.backward()
        return logprobs.grad

    ordinary = gradient([torch.full((size,), -1.0)] * 4)
    assert ordinary.isfinite().all()
    assert torch.equal(gradient([drawn(NOT_FINITE) for _ in range(4)]), ordinary)


def test_a_reply_far_from_the_reference_has_no_gradient() -> None:
    """The middle token is a reply's; the policy gives it e^-96 of the reference's probability."""
    (batch,) = pack([make_rollout(completion=[4, 5, 6], sampled_mask=[True, False, True], advantage=1.0)], [True], 64)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.0, -5.0, -1.0]))
    logprobs = torch.tensor([-1.0, -101.0, -1.0], requires_grad=True)
    Objective(kl=KLConfig(coef=0.04))(batch, logprobs, torch.zeros(3), StepTotals(1, 2, 8)).loss.backward()
    assert logprobs.grad.tolist() == [-0.5, 0.0, -0.5]


@settings(max_examples=40, deadline=None)
@given(step=steps(), order=st.randoms())
def test_no_order_does_either(step: tuple[list[Rollout], list[bool], list[int]], order: object) -> None:
    rollouts, kept, _ = step
    places = list(range(len(rollouts)))
    order.shuffle(places)
    objective = Objective(LOSSES["gspo"], REDUCERS["grpo"], CORRECTIONS, kl=KLConfig(coef=0.1))
    model = TableModel(rollouts)

    def gradient(indices: list[int]) -> torch.Tensor:
        mine = [rollouts[i] for i in indices]
        masks = [kept[i] for i in indices]
        totals = step_totals(mine, masks, 8)
        losses = [objective(*model(batch, mine), totals).loss for batch in pack(mine, masks, 30)]
        return torch.autograd.grad(sum(losses), model.table)[0]

    torch.testing.assert_close(gradient(places), gradient(list(range(len(rollouts)))), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reducer", REDUCERS)
def test_all_completions_masked_gives_loss_zero_and_a_backward_pass(reducer: str, loss: str) -> None:
    rollouts = [make_rollout(g, advantage=1.0) for g in range(2)]
    objective = Objective(LOSSES[loss], REDUCERS[reducer])
    gradient, metrics = total(rollouts, [False, False], [0, 0], 64, "padded", objective)
    assert metrics["policy/loss"] == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_divisor_times_c_is_the_gradient_over_c_exactly(loss: str) -> None:
    rollouts = [make_rollout(g, completion=[4] * (g + 1), advantage=1.0 - g) for g in range(3)]
    gradients = [
        total(rollouts, [True] * 3, [0] * 3, 64, "padded", Objective(LOSSES[loss], ConstantDivisor(d)))[0]
        for d in (100, 400)
    ]
    assert torch.equal(gradients[1], gradients[0] / 4)
