"""The papers' formulas of reducers, held against a saved step: the weight of each token in the loss.

GRPO gives every token of completion o the weight 1/|o|, the token mean 1/sum|o|, Dr. GRPO 1/L (arXiv:2503.20783, section
3.1), each over the number of completions but the second. The step's completions are frozen; the reducer that the arm
really ran with is asked.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlpost.config.build import build
from rlpost.data.packing import active_rollouts, pack, step_totals
from rlpost.objective.reducers import ConstantDivisor, Reducer, SequenceMean, TokenMean
from rlpost.record.completions import load_rollouts
from rlpost.record.rundir import RunDir
from rlpost.types import Rollout, StepTotals


@dataclass(frozen=True)
class TokenWeights:
    """The weights that an arm's reducer gives the tokens of one step.

    Attributes:
        formula: the paper's formula; None for a reducer that is in no paper.
        deviation: the largest relative difference between a weight and the formula's; NaN without one.
        shortest, longest: weight of a token in the shortest and in the longest completion.
    """

    arm: str
    formula: str | None
    deviation: float
    shortest: float
    longest: float


@dataclass(frozen=True)
class FrozenStep:
    """Completions of one step, and which arm's they are."""

    rollouts: Sequence[Rollout]
    source: str

    @property
    def lengths(self) -> list[int]:
        return [len(r.completion.token_ids) for r in self.rollouts]


def freeze(run_dir: Path, arm: str, seed: int) -> FrozenStep:
    """The first step of a run. Raises: UserError where its completions are not there."""
    return FrozenStep(load_rollouts(run_dir, 1), f"{arm}, seed {seed}, step 1")


def token_weights(step: FrozenStep, run_dir: Path, arm: str) -> TokenWeights:
    """Args: run_dir: a run of the arm, whose configuration names the reducer."""
    settings = RunDir(run_dir).settings()
    rollouts = list(step.rollouts)
    masks = active_rollouts(rollouts, settings.algorithm.mask_truncated)
    totals = step_totals(rollouts, masks, settings.rollout.max_tokens)
    (batch,) = pack(rollouts, masks, sys.maxsize, "padded")
    reducer: Reducer = build(settings.reducer)
    weights = reducer(batch.tokens, totals)
    lengths = batch.tokens.active_lengths[batch.sequence_index].double()
    formula, expected = _formula(reducer, lengths, totals)
    active = batch.loss_mask
    deviation = math.nan
    if expected is not None and active.any():
        deviation = (weights / expected - 1)[active].abs().max().item()
    of_length = {int(n): w for n, w in zip(lengths[active].tolist(), weights[active].tolist(), strict=True)}
    if not of_length:
        return TokenWeights(arm, formula, deviation, math.nan, math.nan)
    return TokenWeights(arm, formula, deviation, of_length[min(of_length)], of_length[max(of_length)])


def _formula(reducer: Reducer, lengths: torch.Tensor, totals: StepTotals) -> tuple[str | None, torch.Tensor | None]:
    """The paper's weights, from lengths alone."""
    n, ones = totals.num_sequences, torch.ones_like(lengths)
    match reducer:
        case SequenceMean():
            return "1 / (N |o|)", 1 / (n * lengths)
        case TokenMean():
            return "1 / sum |o|", ones / totals.num_tokens
        case ConstantDivisor(divisor=divisor):
            length = totals.max_completion_tokens if divisor == "max_tokens" else divisor
            return f"1 / (N L), L = {length:g}", ones / (n * length)
        case _:
            return None, None
