"""LoRA (arXiv:2106.09685): adapters are trained beside linear layers whose own weights stay.

Engines get the merged weights, so they need not know. The reference model is the policy with its adapters left out.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlpost import distributed
from rlpost.errors import UserError, require
from rlpost.types import PackedBatch

if TYPE_CHECKING:
    from rlpost.trainer.model import TokenScorer

_NAME = "default"


def add_adapters(model: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Put an adapter beside each linear layer that is meant, in place; nothing else has a gradient afterwards.

    Args:
        rank: r of the adapters' products B A, which start at 0.
        alpha: they count alpha / r times.
        targets: ends of the layers' names; none: all linear layers but the head.

    Raises: UserError if there is no such linear layer.
    """
    require({"peft": "lora"}, f"trainer.lora.rank={rank}")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets) or "all-linear")
    try:
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:
        raise UserError(f"trainer.lora.targets={list(targets)}: {str(error).splitlines()[0]}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Linear):
            raise UserError(f"trainer.lora.targets={list(targets)}: {name} is not a linear layer")


class WithoutAdapters:
    """The reference: the policy's own weights, its adapters left out. No second model in memory."""

    def __init__(self, scorer: "TokenScorer") -> None:
        self._scorer = scorer

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(self._scorer, 0.0):
            return self._scorer(batch)

    def shard_again(self) -> None:
        self._scorer.shard_again()


@torch.no_grad()
def merged(scorer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, under the name it has without adapters; what is adapted with its adapter's product added."""
    for name, parameter in scorer.named_parameters():
        layer, base, kind = name.rpartition(".base_layer.")
        if ".lora_A." in name or ".lora_B." in name:
            continue
        weight = distributed.full(parameter.detach())
        if kind == "weight" and base:
            adapted = scorer.get_submodule(layer)
            a, b = (distributed.full(part[_NAME].weight.detach()) for part in (adapted.lora_A, adapted.lora_B))
            weight = weight + adapted.scaling[_NAME] * (b @ a)
        yield (f"{layer}.{kind}" if base else name), weight
