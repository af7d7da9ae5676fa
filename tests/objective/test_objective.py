"""Reducers and the composed objective: worked numbers, and gradients that no split can change."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.data.packing import empty_batch, pack, step_totals
from rlpost.objective.losses import ClippedLoss
from rlpost.objective.objective import Objective
from rlpost.objective.reducers import ConstantDivisor, SequenceMean, TokenMean, TokenSum
from rlpost.types import PackedBatch, Rollout, StepTotals, TokenView
from tests.conftest import make_rollout

REDUCERS = {
    "grpo": SequenceMean(),
    "drgrpo": ConstantDivisor(7),
    "token_mean": TokenMean(),
    "sum": TokenSum(),
}


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        # Two sequences of 2 and 3 tokens, the last token of the second masked: N = 2, M = 4.
        (SequenceMean(), [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0]),
        (ConstantDivisor(10), [1 / 20] * 4 + [0]),
        (TokenMean(), [1 / 4] * 4 + [0]),
        (TokenSum(), [1, 1, 1, 1, 0]),
    ],
)
def test_weights_by_hand(reducer: object, expected: list[float]) -> None:
    tokens = TokenView(
        sequence_index=torch.tensor([0, 0, 1, 1, 1]),
        loss_mask=torch.tensor([True, True, True, True, False]),
        active_lengths=torch.tensor([2, 2]),
    )
    weights = reducer(tokens, StepTotals(num_sequences=2, num_tokens=4, max_completion_tokens=8))
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(expected)


def test_a_fully_masked_sequence_counts_in_the_mean() -> None:
    tokens = TokenView(torch.tensor([0, 1]), torch.tensor([True, False]), torch.tensor([1, 0]))
    weights = SequenceMean()(tokens, StepTotals(2, 1, 8))
    assert weights.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("divisor", [0, -3, math.nan])
def test_a_divisor_must_be_positive(divisor: float) -> None:
    with pytest.raises(ValueError, match="divisor"):
        ConstantDivisor(divisor)


def test_objective_by_hand() -> None:
    """One token of ratio 1 and advantage 2, KL k1 of 0.5 with weight 0.1, entropy 3 with weight 0.01."""
    rollout = make_rollout(completion=[4], advantage=2.0, logprobs=[-1.25])
    (batch,) = pack([rollout], [True], 64)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.5], dtype=torch.float64))
    objective = Objective(kl_coef=0.1, kl_estimator="k1", entropy_coef=0.01)
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    out = objective(batch, logprobs, torch.tensor([3.0], dtype=torch.float64), StepTotals(1, 1, 8))
    assert out.loss.item() == pytest.approx(-2.0 + 0.1 * 0.5 - 0.01 * 3.0)
    assert out.sums["policy/kl_ref"].item() == pytest.approx(0.5)
    assert out.sums["policy/entropy"].item() == pytest.approx(3.0)
    assert out.maxima["rollout/logprob_diff_max"].item() == pytest.approx(0.25)


def test_kl_reducer_same_weighs_the_kl_like_the_policy_gradient() -> None:
    (batch,) = pack([make_rollout(completion=[4], advantage=0.0)], [True], 64)
    batch = replace(batch, ref_logprobs=torch.tensor([-1.5], dtype=torch.float64))
    logprobs, entropy = torch.tensor([-1.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    losses = [
        Objective(reducer=ConstantDivisor(100), kl_coef=1.0, kl_estimator="k1", kl_reducer=r)(
            batch, logprobs, entropy, StepTotals(1, 1, 8)
        ).loss.item()
        for r in ("sequence_mean", "same")
    ]
    assert losses == pytest.approx([0.5, 0.005])


def test_masked_tokens_that_are_not_finite_change_nothing() -> None:
    rollouts = [make_rollout(0, completion=[4]), make_rollout(1, completion=[5], logprobs=[math.nan])]
    (batch,) = pack(rollouts, [True, False], 64)
    out = Objective()(batch, torch.tensor([-1.0, -math.inf]), torch.ones(2), StepTotals(2, 1, 8))
    assert math.isfinite(out.loss.item())
    assert all(math.isfinite(v.item()) for v in [*out.sums.values(), *out.maxima.values()])


def test_an_unmasked_nan_rollout_logprob_shows() -> None:
    (batch,) = pack([make_rollout(completion=[4], logprobs=[math.nan])], [True], 64)
    out = Objective()(batch, torch.tensor([-1.0]), torch.ones(1), StepTotals(1, 1, 8))
    assert math.isnan(out.maxima["rollout/logprob_diff_max"].item())


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Rollout], list[bool], list[int]]:
    """Rollouts of a step, which of them are masked, and a split of them over simulated ranks."""
    rollouts: list[Rollout] = []
    for group in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
        for sample in range(draw(st.integers(1, 3))):
            completion = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
            advantage = draw(st.floats(-2, 2))
            rollouts.append(
                make_rollout(group, prompt, completion, sample_index=sample, advantage=round(advantage, 3))
            )
    kept = draw(st.lists(st.booleans(), min_size=len(rollouts), max_size=len(rollouts)))
    ranks = draw(st.lists(st.integers(0, 2), min_size=len(rollouts), max_size=len(rollouts)))
    return rollouts, kept, ranks


class TableModel:
    """A differentiable stand-in for the network: a token's logprob depends on its sequence and its place alone."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.key = {id(r): i for i, r in enumerate(rollouts)}
        self.table = torch.randn(len(rollouts), 8, dtype=torch.float64, generator=generator).requires_grad_()
        self.old = self.table.detach() + 0.3 * torch.randn(self.table.shape, dtype=torch.float64, generator=generator)
        self.ref = self.table.detach() + 0.3 * torch.randn(self.table.shape, dtype=torch.float64, generator=generator)

    def __call__(self, batch: PackedBatch, share: list[Rollout]) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
        rows, places, seen = [], [], {}
        for sequence in batch.sequence_index.tolist():
            rows.append(self.key[id(share[batch.rollout_ids[sequence]])])
            places.append(seen.get(sequence, 0))
            seen[sequence] = places[-1] + 1
        at = (torch.tensor(rows, dtype=torch.int64), torch.tensor(places, dtype=torch.int64))
        batch = replace(batch, old_logprobs=self.old[at], ref_logprobs=self.ref[at])
        return batch, self.table[at], self.table[at] ** 2


def total(
    rollouts: list[Rollout], kept: list[bool], ranks: list[int], budget: int, layout: str, objective: Objective
) -> tuple[torch.Tensor, dict[str, float], dict[str, float]]:
    """Gradient and metrics of a step split over ranks and micro-batches, an empty micro-batch on each rank."""
    model = TableModel(rollouts)
    shares = [[i for i, r in enumerate(ranks) if r == rank] for rank in range(3)]
    parts = [step_totals([rollouts[i] for i in s], [kept[i] for i in s], 8) for s in shares]
    totals = StepTotals(sum(p.num_sequences for p in parts), sum(p.num_tokens for p in parts), 8)
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for share in shares:
        mine = [rollouts[i] for i in share]
        for batch in [*pack(mine, [kept[i] for i in share], budget, layout), empty_batch()]:
            out = objective(*model(batch, mine), totals)
            out.loss.backward()
            for name, value in out.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
            for name, value in out.maxima.items():
                maxima[name] = max(maxima.get(name, 0.0), value.item())
    return model.table.grad, sums, maxima


@settings(max_examples=60, deadline=None)
@given(step=steps(), budget=st.integers(1, 40), order=st.randoms())
@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_no_split_changes_gradients_or_metrics(
    reducer: str, layout: str, step: tuple[list[Rollout], list[bool], list[int]], budget: int, order: object
) -> None:
    rollouts, kept, ranks = step
    objective = Objective(
        ClippedLoss(0.2, 0.28), REDUCERS[reducer], kl_coef=0.1, kl_reducer="same", entropy_coef=0.01
    )
    whole = total(rollouts, kept, [0] * len(rollouts), 10_000, "padded", objective)
    split = total(rollouts, kept, ranks, budget, layout, objective)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-10, atol=1e-12)
    for part, expected in zip(split[1:], whole[1:], strict=True):
        assert part == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("reducer", REDUCERS)
def test_all_completions_masked_gives_loss_zero_and_a_backward_pass(reducer: str) -> None:
    rollouts = [make_rollout(g, advantage=1.0) for g in range(2)]
    gradient, sums, _ = total(rollouts, [False, False], [0, 0], 64, "padded", Objective(reducer=REDUCERS[reducer]))
    assert sums["policy/loss"] == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))
