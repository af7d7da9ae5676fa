"""Log-probabilities of chosen tokens, and the entropy of the distributions they were chosen from."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rlpost.objective.matmul import times_transposed

# Entries of the largest [tokens, vocabulary] block computed at a time: 64 MiB in float32.
CHUNK_ENTRIES = 2**24
# Entries of such blocks that wait for the backward pass: 256 MiB in float32. Those of further tokens are computed again.
KEPT_ENTRIES = 2**26


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution that tokens are drawn from: softmax(logits / temperature), cut to a support.

    Attributes:
        temperature: over zero.
        top_p: the smallest set of tokens with at least this probability; top_k: the k most probable ones, 0 is all;
            min_p: those with at least this share of the most probable one's probability. As engines cut: min_p first,
            then top_k, then top_p of what is left.
        excluded: tokens that are never drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    excluded: tuple[int, ...] = ()

    @property
    def is_cut(self) -> bool:
        return (self.top_p, self.top_k, self.min_p, self.excluded) != (1.0, 0, 0.0, ())

    def cut(self, logits: Tensor, targets: Tensor) -> None:
        """Set what is outside of the support to -inf, in place. A target, having been drawn, is always inside.

        Args: logits [T, V], divided by the temperature; targets [T].
        """
        chosen = logits.gather(-1, targets.unsqueeze(-1))
        logits[:, list(self.excluded)] = -math.inf
        if self.min_p > 0:
            logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + math.log(self.min_p), -math.inf)
        if 0 < self.top_k < logits.shape[-1]:
            logits.masked_fill_(logits < logits.topk(self.top_k).values[:, -1:], -math.inf)
        if self.top_p < 1:
            ascending, order = logits.sort(-1)
            outside = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            outside[:, -1] = False
            logits.masked_fill_(torch.zeros_like(outside).scatter_(-1, order, outside), -math.inf)
        logits.scatter_(-1, targets.unsqueeze(-1), chosen)


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    distribution: SamplingDistribution = SamplingDistribution(),
    chunk_entries: int = CHUNK_ENTRIES,
    kept_entries: int = KEPT_ENTRIES,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy, under the distribution made of the logits hidden @ head.T.

    Both passes go through the tokens in chunks. Between them, the first chunks' probabilities are kept, up to
    `kept_entries`; the others' are computed again, so memory does not grow with T.

    Args:
        hidden: [T, H], the states that predict the targets, any float dtype.
        head: [V, H], of the same dtype.
        targets: [T] int64 in 0 .. V-1.
        distribution: the one that was sampled from: the policy is the tempered and cut one, so its log-probabilities
            are too. The gradient takes the support as given.

    Returns:
        logprobs [T] and entropy [T] in nats, float32 or wider, differentiable by hidden and head.
    """
    rows = max(1, chunk_entries // head.shape[0])
    num_kept = kept_entries // head.shape[0] if torch.is_grad_enabled() else 0
    return cast(Any, _TokenLogprobs).apply(hidden, head, targets, distribution, rows, num_kept)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        distribution: SamplingDistribution,
        rows: int,
        num_kept: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, largest, total = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(4))
        kept: list[Tensor] = []
        for chunk in _chunks(len(targets), rows):
            logits = _logits(hidden[chunk], head, targets[chunk], distribution, dtype)
            torch.amax(logits, -1, out=largest[chunk])
            chosen = logits.gather(-1, targets[chunk].unsqueeze(-1)).squeeze(-1)
            shifted = logits.sub_(largest[chunk].unsqueeze(-1))
            weights = shifted.exp()
            torch.sum(weights, -1, out=total[chunk])
            if distribution.is_cut:
                shifted.masked_fill_(weights == 0, 0.0)  # 0 * -inf
            # H = log Z - E[logit], both shifted by the largest logit.
            mean = torch.bmm(weights.unsqueeze(1), shifted.unsqueeze(2)).flatten() / total[chunk]
            log_total = total[chunk].log()
            entropy[chunk] = log_total - mean
            logprobs[chunk] = chosen - (log_total + largest[chunk])
            if chunk.stop <= num_kept:
                kept.append(weights)
        ctx.save_for_backward(hidden, head, targets, largest, total, entropy, *kept)
        ctx.distribution, ctx.rows = distribution, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes as many as there are
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, head, targets, largest, total, entropy, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.empty_like(head) if len(targets) else torch.zeros_like(head)
        for number, chunk in enumerate(_chunks(len(targets), ctx.rows)):
            if number < len(kept):
                weights = kept[number]
            else:
                logits = _logits(hidden[chunk], head, targets[chunk], ctx.distribution, total.dtype)
                weights = logits.sub_(largest[chunk].unsqueeze(-1)).exp_()
            # dlogp_target/dz = onehot - p, dH/dz = -p (log p + H): all of it but the onehot is -p times a factor.
            factor = None if grad_logprobs is None else grad_logprobs[chunk].unsqueeze(-1)
            if grad_entropy is not None:
                logp = (weights / total[chunk].unsqueeze(-1)).log_()
                logp.masked_fill_(weights == 0, 0.0)  # 0 * -inf
                from_entropy = logp.add_(entropy[chunk].unsqueeze(-1)).mul_(grad_entropy[chunk].unsqueeze(-1))
                factor = from_entropy if factor is None else from_entropy.add_(factor)
            assert factor is not None
            grad = weights * (factor / -total[chunk].unsqueeze(-1))
            if grad_logprobs is not None:
                grad.scatter_add_(-1, targets[chunk].unsqueeze(-1), grad_logprobs[chunk].unsqueeze(-1))
            if ctx.distribution.temperature != 1.0:
                grad.div_(ctx.distribution.temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[chunk] = times_transposed(grad, head.T)
            grad_head.addmm_(grad.T, hidden[chunk], beta=float(number > 0))
        return grad_hidden, grad_head, None, None, None, None


def _logits(
    hidden: Tensor, head: Tensor, targets: Tensor, distribution: SamplingDistribution, dtype: torch.dtype
) -> Tensor:
    """[rows, V], fresh, divided by the temperature and cut to the support."""
    logits = times_transposed(hidden, head).to(dtype)
    if distribution.temperature != 1.0:
        logits.div_(distribution.temperature)
    if distribution.is_cut:
        distribution.cut(logits, targets)
    return logits


def _chunks(length: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, length)) for start in range(0, length, rows))
