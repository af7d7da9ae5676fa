"""LoRA (arXiv:2106.09685): adapters are trained beside linear layers whose own weights stay.

Engines get the merged weights, so they need not know. The reference model is the policy with its adapters left out.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlpost import distributed
from rlpost.config.schema import LoRAConfig
from rlpost.errors import UserError, require
from rlpost.types import PackedBatch

if TYPE_CHECKING:
    from rlpost.trainer.model import PolicyModel

_NAME = "default"


def add_adapters(model: nn.Module, lora: LoRAConfig) -> None:
    """Put an adapter beside each linear layer that is meant, in place; nothing else has a gradient afterwards.

    An adapter is a product B A of rank r, which starts at 0 and counts alpha / r times.

    Raises: UserError if there is no such linear layer.
    """
    require({"peft": "lora"}, f"trainer.lora.rank={lora.rank}")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - a float works
        target_modules=list(lora.targets) or "all-linear",
    )
    try:
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:
        raise UserError(f"trainer.lora.targets={lora.targets}: {str(error).splitlines()[0]}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Linear):
            raise UserError(f"trainer.lora.targets={lora.targets}: {name} is not a linear layer")


class WithoutAdapters:
    """The reference: the policy's own weights, its adapters left out. No second model in memory."""

    def __init__(self, policy_model: "PolicyModel") -> None:
        self._policy_model = policy_model

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(self._policy_model, 0.0):
            return self._policy_model(batch)

    def shard_again(self) -> None:
        self._policy_model.shard_again()


@torch.no_grad()
def merged(policy_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, under the name it has without adapters; what is adapted with its adapter's product added."""
    for name, parameter in policy_model.named_parameters():
        layer, base, kind = name.rpartition(".base_layer.")
        if ".lora_A." in name or ".lora_B." in name:
            continue
        weight = distributed.full(parameter.detach())
        if kind == "weight" and base:
            adapted: Any = policy_model.get_submodule(layer)  # a LoraLayer, whose parts are found by name
            a, b = (distributed.full(part[_NAME].weight.detach()) for part in (adapted.lora_A, adapted.lora_B))
            weight = weight + adapted.scaling[_NAME] * (b @ a)
        yield (f"{layer}.{kind}" if base else name), weight
