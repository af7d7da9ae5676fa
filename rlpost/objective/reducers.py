"""Reducers: the weight of each token in the step's policy-gradient loss.

The step's loss is (token_loss * weight).sum() over all micro-batches and ranks. Weights come from the totals of the whole
optimizer step, so no split of the batch can change them. Masked tokens weigh 0; a sequence whose tokens are all masked
still counts in N.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from rlpost.config.plugins import load_function
from rlpost.config.ranges import Above
from rlpost.types import StepTotals, TokenView


class Reducer(Protocol):
    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor: ...  # [T] float64 weights


@dataclass(frozen=True)
class SequenceMean:
    """1 / (N * len_i): mean over sequences of each one's token mean (GRPO, arXiv:2402.03300, eq. 3).

    Every reported metric uses it too, whatever reducer the loss has, so that runs stay comparable.
    """

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        lengths = tokens.active_lengths.clamp(min=1).double()[tokens.sequence_index]
        return tokens.loss_mask / (totals.num_sequences * lengths)


@dataclass(frozen=True)
class ConstantDivisor:
    """1 / (N * divisor): each sequence's token sum over a constant, mean over sequences (Dr. GRPO, arXiv:2503.20783).

    Attributes: divisor: over zero, or "max_tokens": the longest completion allowed.
    """

    divisor: Annotated[float, Above(0)] | Literal["max_tokens"] = 1000

    def __post_init__(self) -> None:
        divisor = cast(object, self.divisor)  # a configuration's, of any type
        if divisor != "max_tokens" and not (isinstance(divisor, int | float) and divisor > 0):
            raise ValueError(f"divisor must be over zero, or max_tokens, not {self.divisor}")

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        divisor = totals.max_completion_tokens if self.divisor == "max_tokens" else self.divisor
        return tokens.loss_mask.double() / (totals.num_sequences * divisor)


@dataclass(frozen=True)
class TokenMean:
    """1 / M: mean over all active tokens of the step (DAPO, arXiv:2503.14476, eq. 8)."""

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        return tokens.loss_mask.double() / max(totals.num_tokens, 1)


@dataclass(frozen=True)
class TokenSum:
    """1: plain sum over all active tokens."""

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        return tokens.loss_mask.to(torch.float64)


PgLossReducerFactory = Callable[[list[int], list[int], list[Tensor], bool], Callable[[Tensor], Tensor]]


class FunctionReducer:
    """A user's reducer with the Miles framework's signature, by import path.

    The factory takes (total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False), lists with an entry a
    sequence, and gives a function from the sequences' concatenated token losses to a number. That function is linear, so
    its gradient is each token's weight; it is taken on whole sequences, one at a time, and divided by N (with
    calculate_per_token_loss by M), which the framework does outside of it. So it works under packing, micro-batches, ranks
    and context parallelism. Tokens that the mask leaves out weigh 0.

    Args:
        path: "package.module:function", or "path/to/file.py:function".
        calculate_per_token_loss: passed on; the reducer is then to sum tokens.

    Raises: ValueError where the function is not linear, or couples sequences (its weights would then change with the
        micro-batch): at once, on two made-up sequences, and again for the linearity of every sequence it is used on.
    """

    function_settings: ClassVar[Mapping[str, Sequence[str]]] = {
        "path": ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
    }

    def __init__(self, path: str, calculate_per_token_loss: bool = False) -> None:
        self.path = path
        self.calculate_per_token_loss = calculate_per_token_loss
        self._factory: PgLossReducerFactory = load_function(path, "reducer.path")
        self._check_coupling()

    def __call__(self, tokens: TokenView, totals: StepTotals) -> Tensor:
        lengths = torch.tensor([len(mask) for mask in tokens.completion_masks], dtype=torch.int64)
        starts = (lengths.cumsum(0) - lengths).to(tokens.sequence_index.device)
        weights = [
            self._weights([prompt], [mask])
            for prompt, mask in zip(tokens.prompt_lengths, tokens.completion_masks, strict=True)
        ]
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *weights]).to(tokens.sequence_index.device)
        share = flat[starts[tokens.sequence_index] + tokens.token_index]
        count = totals.num_tokens if self.calculate_per_token_loss else totals.num_sequences
        return torch.where(tokens.loss_mask, share, 0.0) / max(count, 1)

    @torch.enable_grad()
    def _weights(self, prompt_lengths: Sequence[int], masks: Sequence[Tensor]) -> Tensor:
        """The gradient of the user's function on whole sequences, [sum of their lengths] float64."""
        lengths = [len(mask) for mask in masks]
        reduce = self._factory(
            [prompt + length for prompt, length in zip(prompt_lengths, lengths, strict=True)],
            lengths,
            [mask.to(torch.int64) for mask in masks],
            self.calculate_per_token_loss,
        )
        x = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(self._number(reduce(x)), x, allow_unused=True)
        gradient = torch.zeros_like(x) if cast(Tensor | None, gradient) is None else gradient
        # Signs and sizes differ from token to token, and both signs of it are tried: only a linear function passes.
        probe = torch.sin(torch.arange(sum(lengths), dtype=torch.float64) * 1.7 + 0.3)
        for point in (probe, -2 * probe):
            if not torch.allclose(self._number(reduce(point)), gradient @ point):
                raise ValueError(
                    f"reducer.path={self.path} is not linear in the token losses: a reducer weighs and sums them; "
                    "what bends them belongs into a loss (algorithm.loss)"
                )
        return gradient

    def _number(self, value: object) -> Tensor:
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"reducer.path={self.path}: the reducer must return a tensor with one number, not {value!r}"
            )
        return value.double().squeeze()

    def _check_coupling(self) -> None:
        """Check that two sequences side by side get the weights that each gets alone."""
        prompts, masks = [3, 2], [torch.tensor([True, True, False, True, True]), torch.tensor([True, True, True])]
        alone = torch.cat([self._weights([p], [m]) for p, m in zip(prompts, masks, strict=True)])
        if not torch.allclose(self._weights(prompts, masks), alone):
            raise ValueError(
                f"reducer.path={self.path} gives a sequence other weights when another one is beside it: its gradients "
                "would change with the micro-batch; divide by what belongs to one sequence, or by a constant"
            )
