"""Log-probabilities of chosen tokens, and the entropy of the distributions they were chosen from."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Entries of the largest [tokens, vocabulary] block held at a time: 64 MiB in float32.
CHUNK_ENTRIES = 2**24


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution that tokens are drawn from: softmax(logits / temperature), cut to a support.

    Attributes:
        temperature: over zero.
        top_p: the smallest set of tokens with at least this probability; top_k: the k most probable ones, 0 is all;
            min_p: those with at least this share of the most probable one's probability. As engines cut: min_p first,
            then top_k, then top_p of what is left.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_cut(self) -> bool:
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    def cut(self, logits: Tensor, targets: Tensor) -> None:
        """Set what is outside of the support to -inf, in place. A target, having been drawn, is always inside.

        Args: logits [T, V], divided by the temperature; targets [T].
        """
        chosen = logits.gather(-1, targets.unsqueeze(-1))
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
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy, under the distribution made of the logits hidden @ head.T.

    Neither pass ever holds [T, V]: both go through the tokens in chunks, and the backward pass computes a chunk's
    logits again, so memory does not grow with T.

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
    return _TokenLogprobs.apply(hidden, head, targets, distribution, rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, distribution: SamplingDistribution, rows: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, log_normalizer = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(3))
        blocks = _Blocks(hidden, head, targets, distribution, rows, dtype)
        for chunk in _chunks(len(targets), rows):
            logits = blocks.logits(chunk)
            largest = logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, targets[chunk].unsqueeze(-1)).squeeze(-1)
            shifted = logits.sub_(largest)
            weights = torch.exp(shifted, out=blocks.scratch(chunk))
            total = weights.sum(-1)
            if distribution.is_cut:
                shifted.masked_fill_(weights == 0, 0.0)  # 0 * -inf
            # H = log Z - E[logit], both shifted by the largest logit.
            entropy[chunk] = total.log() - weights.mul_(shifted).sum(-1) / total
            log_normalizer[chunk] = total.log() + largest.squeeze(-1)
            logprobs[chunk] = chosen - log_normalizer[chunk]
        ctx.save_for_backward(hidden, head, targets, log_normalizer, entropy)
        ctx.distribution, ctx.rows = distribution, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden, grad_head = torch.zeros_like(hidden), torch.zeros_like(head)
        blocks = _Blocks(hidden, head, targets, ctx.distribution, ctx.rows, log_normalizer.dtype)
        for chunk in _chunks(len(targets), ctx.rows):
            logp = blocks.logits(chunk).sub_(log_normalizer[chunk].unsqueeze(-1))
            # The probabilities; turned into the logits' gradient in place.
            grad = torch.exp(logp, out=blocks.scratch(chunk))
            if ctx.distribution.is_cut:
                logp.masked_fill_(grad == 0, 0.0)  # 0 * -inf
            if grad_entropy is None:
                from_entropy = None
            else:  # dH/dz = -p (log p + H)
                from_entropy = logp.add_(entropy[chunk].unsqueeze(-1)).mul_(grad)
                from_entropy.mul_(grad_entropy[chunk].unsqueeze(-1))
            if grad_logprobs is None:
                grad.zero_()
            else:  # dlogp_target/dz = onehot - p
                grad.mul_(-grad_logprobs[chunk].unsqueeze(-1))
                grad.scatter_add_(-1, targets[chunk].unsqueeze(-1), grad_logprobs[chunk].unsqueeze(-1))
            if from_entropy is not None:
                grad.sub_(from_entropy)
            if ctx.distribution.temperature != 1.0:
                grad.div_(ctx.distribution.temperature)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, head, out=grad_hidden[chunk])
            grad_head.addmm_(grad.T, hidden[chunk])
        return grad_hidden, grad_head, None, None, None


class _Blocks:
    """Two [rows, V] blocks, used again for every chunk: fresh ones cost more in page faults than in arithmetic."""

    def __init__(
        self,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        distribution: SamplingDistribution,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        self._hidden, self._head, self._targets, self._distribution = hidden, head, targets, distribution
        shape = (min(rows, len(hidden)), head.shape[0])
        self._logits, self._scratch = (hidden.new_empty(shape, dtype=dtype) for _ in range(2))

    def logits(self, chunk: slice) -> Tensor:
        block = self._logits[: chunk.stop - chunk.start]
        if block.dtype == self._hidden.dtype:
            torch.mm(self._hidden[chunk], self._head.T, out=block)
        else:
            block.copy_(self._hidden[chunk] @ self._head.T)
        if self._distribution.temperature != 1.0:
            block.div_(self._distribution.temperature)
        if self._distribution.is_cut:
            self._distribution.cut(block, self._targets[chunk])
        return block

    def scratch(self, chunk: slice) -> Tensor:
        return self._scratch[: chunk.stop - chunk.start]


def _chunks(length: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, length)) for start in range(0, length, rows))
