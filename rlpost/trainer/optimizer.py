"""Optimizers: how a step's gradient changes the weights, at which learning rate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from torch.nn import Parameter

from rlpost import distributed
from rlpost.config.ranges import Above, AtLeast


class Optimizer:
    """A torch optimizer, its learning rate over the run's optimizer steps, and a bound on the gradient.

    Attributes:
        torch_optimizer: whatever holds the moments; torch.distributed.checkpoint saves it with the weights.
        max_grad_norm: bound on the gradient's 2-norm; None clips nothing.
    """

    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        parameters: Sequence[Parameter],
        max_grad_norm: float | None,
    ) -> None:
        self.torch_optimizer = torch_optimizer
        self.max_grad_norm = max_grad_norm
        self._scheduler = scheduler
        self._parameters = parameters  # in the model's order, in which their norms are added

    def zero_grad(self) -> None:
        self.torch_optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """Clip the gradient and change the weights.

        Returns: `policy/grad_norm`, before clipping, and `policy/lr`.

        Raises: FloatingPointError, before any weight changes, if the gradient is not finite.
        """
        bound = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = distributed.full(torch.nn.utils.clip_grad_norm_(self._parameters, bound)).item()
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}: the run has diverged (the weights are still those of the last "
                "step); lower optimizer.lr or optimizer.max_grad_norm"
            )
        lr = self.torch_optimizer.param_groups[0]["lr"]
        self.torch_optimizer.step()
        self._scheduler.step()
        return {"policy/grad_norm": norm, "policy/lr": lr}

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state. The moments are saved with the weights, for they are sharded like them."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scheduler.load_state_dict(dict(state))


class OptimizerFactory(Protocol):
    """The protocol of what `optimizer` in a configuration names."""

    def __call__(self, parameters: Iterable[Parameter], num_steps: int) -> Optimizer:
        """Args: num_steps: optimizer steps of the whole run."""
        ...


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv:1711.05101) over float32 weights; norms and biases are not decayed.

    Attributes:
        lr: the learning rate after the warm-up.
        betas: the decays of the first and the second moment.
        eps: a constant added to the second moment's root.
        weight_decay: the decay of weights of two dimensions and more; a step takes off lr * weight_decay of each.
        max_grad_norm: bound on the gradient's 2-norm; None clips nothing.
        schedule: the learning rate after the warm-up: constant, or linear or a half cosine down to 0 at the last step.
        warmup_steps: optimizer steps over which the learning rate rises from 0.
    """

    lr: Annotated[float, AtLeast(0)] = 1e-5
    betas: tuple[Annotated[float, AtLeast(0, below=1)], Annotated[float, AtLeast(0, below=1)]] = (0.9, 0.95)
    eps: Annotated[float, AtLeast(0)] = 1e-8
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    max_grad_norm: Annotated[float, Above(0)] | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, AtLeast(0)] = 0

    def __call__(self, parameters: Iterable[Parameter], num_steps: int) -> Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        # fused: one pass over memory, not ten
        optimizer = torch.optim.AdamW(
            groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True
        )
        scheduler = make_scheduler(optimizer, self.schedule, self.warmup_steps, num_steps)
        return Optimizer(optimizer, scheduler, trained, self.max_grad_norm)


def make_scheduler(
    optimizer: torch.optim.Optimizer,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    num_steps: int,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Learning rate over optimizer steps: a linear warm-up, then constant, linear or cosine down to zero.

    The factors are those of transformers' get_scheduler, whose import takes a second that every start of a run would pay.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        left = num_steps - warmup_steps
        if schedule == "linear":
            return max(0.0, (num_steps - step) / max(1, left))
        if schedule == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup_steps) / max(1, left)))))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
