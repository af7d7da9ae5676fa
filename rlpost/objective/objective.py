"""The step's loss: per-token losses times per-token weights, summed. Nothing else divides."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlpost.objective.losses import ClippedLoss, Loss
from rlpost.objective.reducers import Reducer, SequenceMean
from rlpost.objective.regularizers import KLEstimator, kl_estimate
from rlpost.types import PackedBatch, StepTotals


class ObjectiveOutput(NamedTuple):
    """A micro-batch's part of the step: every entry adds up (or takes its maximum) over micro-batches and ranks."""

    loss: Tensor  # scalar with gradient
    sums: dict[str, Tensor]  # metric name -> scalar part of a sum
    maxima: dict[str, Tensor]  # metric name -> scalar


@dataclass(frozen=True)
class Objective:
    """Policy gradient through `reducer`; KL and entropy terms, and all metrics, through the sequence mean.

    Attributes:
        kl_coef: weight of the KL term towards the reference model; 0 needs no reference.
        kl_reducer: "sequence_mean", or "same" to weigh the KL term like the policy gradient.
        entropy_coef: weight of the entropy bonus (subtracted from the loss).
    """

    loss: Loss = field(default_factory=ClippedLoss)
    reducer: Reducer = field(default_factory=SequenceMean)
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_reducer: Literal["sequence_mean", "same"] = "sequence_mean"
    entropy_coef: float = 0.0

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, totals: StepTotals) -> ObjectiveOutput:
        """Args: logprobs [T] and entropy [T] by the current policy, both with gradient."""
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        advantages = batch.advantages.to(logprobs.dtype)[batch.sequence_index]
        token = self.loss(logprobs, old_logprobs, advantages)
        weights = self.reducer(batch.tokens, totals).to(logprobs.dtype)
        mean_weights = SequenceMean()(batch.tokens, totals).to(logprobs.dtype)

        loss = _weighted_sum(token.loss, weights)
        sums = {
            "policy/entropy": _weighted_sum(entropy.detach(), mean_weights),
            "policy/ratio_mean": _weighted_sum(token.ratio, mean_weights),
            "policy/clip_low": _weighted_sum(token.clipped_low.to(logprobs.dtype), mean_weights),
            "policy/clip_high": _weighted_sum(token.clipped_high.to(logprobs.dtype), mean_weights),
        }
        maxima = {"policy/ratio_max": _masked_max(token.ratio, batch.loss_mask)}

        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs, self.kl_estimator)
            loss = loss + self.kl_coef * _weighted_sum(kl, weights if self.kl_reducer == "same" else mean_weights)
            sums["policy/kl_ref"] = _weighted_sum(kl.detach(), mean_weights)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * _weighted_sum(entropy, mean_weights)
        sums["policy/loss"] = loss.detach()

        gap = (old_logprobs - batch.rollout_logprobs).abs()
        sums["rollout/logprob_diff_mean"] = _weighted_sum(gap, mean_weights)
        maxima["rollout/logprob_diff_max"] = _masked_max(gap, batch.loss_mask)
        return ObjectiveOutput(loss, sums, maxima)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values * weights, where a weight of 0 drops its value even if that is not finite."""
    return torch.where(weights != 0, values, 0.0).mul(weights).sum()


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value under the mask; 0 where the mask is empty."""
    return torch.where(mask, values, 0.0).max() if values.numel() else values.new_zeros(())
