"""The step's loss: per-token losses times per-token weights, summed. Nothing else divides."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlpost.config.schema import KLConfig
from rlpost.objective.corrections import Correction
from rlpost.objective.losses import ClippedLoss, Loss
from rlpost.objective.metrics import Max, Mean, Metric, Sum
from rlpost.objective.ratios import log_ratio, ratio_of
from rlpost.objective.reducers import Reducer, SequenceMean
from rlpost.objective.regularizers import kl_estimate
from rlpost.types import PackedBatch, StepTotals


class ObjectiveOutput(NamedTuple):
    """A micro-batch's part of the step: losses add up over micro-batches and ranks, metrics know how they do."""

    loss: Tensor  # scalar with gradient
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class Objective:
    """Policy gradient through `reducer`; KL and entropy terms, and all metrics, through the sequence mean.

    Attributes:
        corrections: by name; their multipliers multiply the policy gradient's token losses.
        kl: the KL term towards the reference model. With a weight of 0 in the loss it is reported where there is a
            reference. `kl.unbiased` multiplies the estimate by the ratio pi / pi_old, which makes its gradient the KL's own
            (DeepSeek-V3.2, arXiv:2512.02556): the gradient of k1 alone is zero on average, that of k3 alone is that of
            another divergence.
        entropy_coef: weight of the entropy bonus (subtracted from the loss).
        max_log_ratio: bound on the size of log-ratios before they are exponentiated; None: the dtype's own.
    """

    loss: Loss = field(default_factory=ClippedLoss)
    reducer: Reducer = field(default_factory=SequenceMean)
    corrections: Mapping[str, Correction] = field(default_factory=dict[str, Correction])
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    max_log_ratio: float | None = None

    @property
    def hooks(self) -> dict[str, Loss | Reducer | Correction]:
        """The parts that a configuration names."""
        return {
            "loss": self.loss,
            "reducer": self.reducer,
            **{f"correction.{name}": correction for name, correction in self.corrections.items()},
        }

    @property
    def is_zero_at_zero_advantage(self) -> bool:
        """True if a sequence of advantage 0 has a gradient of exactly 0."""
        return not self.kl.loss_coef and not self.entropy_coef and getattr(self.loss, "zero_at_zero_advantage", False)

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, totals: StepTotals) -> ObjectiveOutput:
        """Args: logprobs [T] and entropy [T] by the current policy, both with gradient."""
        bound = math.inf if self.max_log_ratio is None else self.max_log_ratio
        tokens = replace(batch.tokens, max_log_ratio=bound)
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        advantages = batch.advantages.to(logprobs.dtype)[batch.sequence_index]
        token = self.loss(logprobs, old_logprobs, advantages, tokens)
        weights = self.reducer(tokens, totals).to(logprobs.dtype)
        mean_weights = SequenceMean()(tokens, totals).to(logprobs.dtype)

        token_loss = token.loss
        metrics: dict[str, Metric] = {}
        for name, correction in self.corrections.items():
            out = correction(logprobs.detach(), old_logprobs, batch.rollout_logprobs, advantages, tokens)
            token_loss = _scaled(token_loss, out.multiplier)
            metrics[f"objective/{name}_cut"] = Sum(_weighted_sum(out.cut.to(logprobs.dtype), mean_weights))
        if batch.has_policy_gradient is not None:
            token_loss = _scaled(token_loss, batch.has_policy_gradient.to(logprobs.dtype))
            metrics["objective/top_entropy_cut"] = Sum(
                _weighted_sum((~batch.has_policy_gradient).to(logprobs.dtype), mean_weights)
            )

        loss = _weighted_sum(token_loss, weights)
        metrics |= {
            "policy/entropy": Sum(_weighted_sum(entropy.detach(), mean_weights)),
            "policy/ratio_mean": Sum(_weighted_sum(token.ratio, mean_weights)),
            "policy/clip_low": Sum(_weighted_sum(token.clipped_low.to(logprobs.dtype), mean_weights)),
            "policy/clip_high": Sum(_weighted_sum(token.clipped_high.to(logprobs.dtype), mean_weights)),
            "policy/ratio_max": Max(_masked_max(token.ratio, batch.loss_mask)),
            "objective/pg_scale": Mean((advantages.abs() * weights).sum(), (advantages.abs() * mean_weights).sum()),
        }

        if batch.ref_logprobs is not None:
            kl = kl_estimate(log_ratio(logprobs, batch.ref_logprobs, tokens), self.kl.estimator, tokens.max_log_ratio)
            metrics["policy/kl_ref"] = Sum(_weighted_sum(kl.detach(), mean_weights))
            if self.kl.loss_coef:
                if self.kl.unbiased:
                    kl = kl * ratio_of(log_ratio(logprobs, old_logprobs, tokens), tokens)
                kl_weights = weights if self.kl.reducer == "same" else mean_weights
                loss = loss + self.kl.loss_coef * _weighted_sum(kl, kl_weights)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * _weighted_sum(entropy, mean_weights)
        metrics["policy/loss"] = Sum(loss.detach())

        gap = (old_logprobs - batch.rollout_logprobs).abs()
        metrics["rollout/logprob_diff_mean"] = Sum(_weighted_sum(gap, mean_weights))
        metrics["rollout/logprob_diff_max"] = Max(_masked_max(gap, batch.loss_mask))
        return ObjectiveOutput(loss, metrics)


def _scaled(values: Tensor, multiplier: Tensor) -> Tensor:
    """values * multiplier, where a multiplier of 0 drops its value even if that is not finite."""
    return torch.where(multiplier != 0, values, 0.0) * multiplier


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    return _scaled(values, weights).sum()


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value under the mask; 0 where the mask is empty."""
    return torch.where(mask, values, 0.0).max() if values.numel() else values.new_zeros(())
