"""The policy network: a transformers causal language model that answers with log-probabilities, sharded by FSDP2."""

import logging
from pathlib import Path
from typing import Any

import torch

# What load_tokenizer and load_model import when they are first called, in a second: a forkserver has it ready.
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlpost import distributed
from rlpost.config.schema import TrainerConfig
from rlpost.data.packing import Layout
from rlpost.data.vision import Vision
from rlpost.errors import UserError
from rlpost.models.sources import load_model
from rlpost.objective.logprobs import SamplingDistribution, token_logprobs
from rlpost.trainer.attention import FLEX, PACKED, block_mask, plan
from rlpost.trainer.context import share
from rlpost.trainer.linear import use_onednn
from rlpost.types import PackedBatch, PackedGroup

log = logging.getLogger(__name__)


# A transformers PreTrainedModel. nn.Module's types know nothing of what its subclasses have, and call all of it a tensor.
LanguageModel = Any


class PolicyModel(nn.Module):
    """Log-probability and entropy of a micro-batch's completion tokens.

    The head runs on the positions that predict a completion token only, and on a chunk of them at a time.
    """

    def __init__(
        self, language_model: LanguageModel, distribution: SamplingDistribution, vision: Vision | None = None
    ) -> None:
        super().__init__()
        self.language_model: LanguageModel
        self.language_model = language_model
        self.distribution = distribution
        self.vision = vision

    @property
    def layout(self) -> Layout:
        """The layout of the micro-batches that this model takes."""
        return "padded" if self.language_model.config._attn_implementation == "sdpa" else "shared_prefix"

    def hold_gradients(self, hold: bool) -> None:
        """Keep parameters and gradients as they are after the next backward pass, for another one to follow.

        Only where there is one rank: several would each have to hold all of the gradients for it.
        """
        if isinstance(self, FSDPModule) and distributed.world_size() == 1:
            self.set_requires_gradient_sync(not hold)
            self.set_reshard_after_backward(not hold)

    def shard_again(self) -> None:
        """After passes without a gradient, which leave parameters whole; optimizer and checkpoints expect shards."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Returns: logprobs [T] and entropy [T] under the sampling distribution, both with gradient."""
        if distributed.context_size() == 1:
            hidden = _hidden_states(self.language_model, batch, self.vision)
            return self._score(hidden, batch.predictor_index, batch.target_ids)
        mine = share(batch)
        hidden = _hidden_states(self.language_model, mine.row, None, mine.positions)
        logprobs, entropy = self._score(hidden, mine.predictor_index, mine.target_ids)
        return mine.whole(logprobs), mine.whole(entropy)

    def _score(self, hidden: Tensor, predictor_index: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        # Not hidden[index]: completions share their prompt's last position, and the gradient of plain indexing adds up
        # such repeats in whatever order the threads come, so a run would not repeat to the last bit.
        predicting = hidden.flatten(0, 1).index_select(0, predictor_index)
        head = self.language_model.get_output_embeddings().weight
        return token_logprobs(predicting, head, target_ids, self.distribution)


def _hidden_states(
    model: LanguageModel, batch: PackedBatch, vision: Vision | None, positions: slice | None = None
) -> Tensor:
    """[R, W, H]: a completion's are those of its prompt and itself alone, in either layout.

    Args: positions: this rank's positions of a row that ranks share; None: all.
    """
    if vision is not None:
        return _hidden_states_with_images(model, batch, vision)
    implementation = model.config._attn_implementation
    if implementation == PACKED:
        attention: dict[str, Any] = {"packed": plan(batch.groups, batch.input_ids.device)}
    elif implementation == FLEX:
        attention = {"attention_mask": block_mask(batch)}
    else:  # the model makes its own mask, windows and all, from which places are padding
        attention = {"attention_mask": batch.group_index >= 0}
    ids, places = batch.input_ids, batch.position_ids
    if positions is not None:
        attention["in_context"] = True
        ids, places = ids[:, positions], places[:, positions]
    return model.base_model(input_ids=ids, position_ids=places, use_cache=False, **attention).last_hidden_state


def _hidden_states_with_images(model: LanguageModel, batch: PackedBatch, vision: Vision) -> Tensor:
    """The model's inputs in the padded layout. The model counts positions itself: those of an image may have two dimensions."""
    rows, width = batch.input_ids.shape
    images = vision.model_inputs(batch.prompts, [0] * rows, width)
    hidden = model.base_model(
        input_ids=batch.input_ids,
        attention_mask=batch.group_index >= 0,
        use_cache=False,
        **{name: values.to(batch.input_ids.device) for name, values in images.items()},
    ).last_hidden_state
    if images or not hidden.requires_grad:
        return hidden
    # Where no row has an image the vision tower has no gradient, and ranks that have one would wait for it.
    return hidden + 0 * sum(parameter.sum() for parameter in model.parameters())


def load(directory: Path, layout: Layout = "shared_prefix", trust_remote_code: bool = False) -> LanguageModel:
    """A causal language model with float32 weights (the optimizer's masters), dropout off.

    Args: layout: shared_prefix falls back to padded, and the log says so, for a model whose attention cannot have
        several completions behind one prompt.

    Raises: UserError for an architecture whose logits are not its head's output alone.
    """
    model = load_model(directory, torch.float32, trust_remote_code, attn_implementation="sdpa")
    model.eval()  # dropout would make sampling and training disagree; gradients flow all the same
    _check_plain_head(model)
    if layout == "shared_prefix":
        if (reason := _why_not_packed(model)) is None:
            model.set_attn_implementation(FLEX if torch.cuda.is_available() else PACKED)
        else:
            log.warning("%s: %s, so each completion gets a row of its own (padded)", type(model).__name__, reason)
    use_onednn(model)
    return model


@torch.no_grad()
def _why_not_packed(model: LanguageModel) -> str | None:
    """Why the model cannot take the shared_prefix layout; None if it can."""
    if hasattr(model.config, "vision_config"):
        return "it takes images"
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        kinds = ["sliding_attention"]
    if other := set(kinds or []) - {"full_attention"}:
        return f"it has layers of {', '.join(sorted(other))}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    # Two completions behind one prompt, against each alone: an architecture may ignore what it is handed.
    prompt, completions = [1, 2, 3], [[4, 5, 6], [7, 8]]
    alone = [
        model.base_model(input_ids=torch.tensor([[*prompt, *c]]), use_cache=False).last_hidden_state[0, len(prompt) :]
        for c in completions
    ]
    ids, positions = torch.tensor([[*prompt, 4, 5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4]])
    groups = [PackedGroup(0, len(prompt), tuple(len(c) for c in completions))]
    model.set_attn_implementation(PACKED)
    try:
        together = model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, packed=plan(groups, ids.device)
        ).last_hidden_state[0, len(prompt) :]
    except (TypeError, ValueError):
        return "it does not hand its attention what a packed row needs"
    finally:
        model.set_attn_implementation("sdpa")
    difference = (together - torch.cat(alone)).abs().max() / torch.cat(alone).abs().max()
    return None if difference < 1e-4 else f"a packed row changes its output by {difference:.1g} of it"


def shard(
    model: LanguageModel,
    distribution: SamplingDistribution,
    mesh: DeviceMesh,
    trainer: TrainerConfig,
    vision: Vision | None = None,
) -> PolicyModel:
    """Wrap and shard with `fully_shard`: a unit per block, and the root with embeddings and head.

    The weights come to the GPU a unit at a time, of which each rank keeps its shard. Gradients are summed over ranks, not
    averaged: the objective's weights hold the step's denominators already. One rank in float32 has nothing to shard and
    nothing to cast, and is spared the copies.

    Args:
        mesh: the ranks, in one dimension or as (replicas, shards).
        trainer: its precision, activation checkpointing and offloading are read here.
        vision: the processor of a model that takes images.

    Raises: UserError if the model's rows cannot be split over the ranks of a context group, or there is no GPU to offload.
    """
    _check_context(model)
    if trainer.cpu_offload and distributed.device().type == "cpu":
        raise UserError("trainer.cpu_offload=true moves weights off a GPU, and there is none")
    if trainer.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
        _disable_dropout(model)
    policy_model = PolicyModel(model, distribution, vision)
    alone = mesh.size() == 1
    if alone and trainer.precision == "float32" and not trainer.cpu_offload:
        return policy_model.to(distributed.device())
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if trainer.precision == "bfloat16"
        else MixedPrecisionPolicy()
    )
    offload = CPUOffloadPolicy() if trainer.cpu_offload else OffloadPolicy()
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=not alone)
    fully_shard(policy_model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if alone:  # nothing to sum: a factor would only cost a pass over every gradient
        return policy_model
    for module in policy_model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum
    return policy_model


def _check_context(model: LanguageModel) -> None:
    size = distributed.context_size()
    if size == 1:
        return
    if model.config._attn_implementation not in (PACKED, FLEX):
        raise UserError(
            f"trainer.context_parallel={size}: {type(model).__name__} has trainer.layout=padded, whose rows are not split; "
            "choose another architecture, or 1"
        )
    if (heads := model.config.get_text_config().num_attention_heads) % size:
        raise UserError(f"trainer.context_parallel={size} has to divide the model's {heads} attention heads")


def _blocks(model: LanguageModel) -> list[nn.Module]:
    """The language model's blocks, by the class names that the architecture declares as not to be split.

    A vision tower's belong to the root: ranks gather blocks together, and a rank without an image does not come to them.
    """
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.get_decoder().modules() if type(module).__name__ in names]


def _disable_dropout(model: LanguageModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - nn.Module's types know only tensors and modules


@torch.no_grad()
def _check_plain_head(model: LanguageModel) -> None:
    ids = torch.arange(4).unsqueeze(0) % model.config.get_text_config().vocab_size
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(
        hidden @ model.get_output_embeddings().weight.T, model(input_ids=ids, use_cache=False).logits, atol=1e-4
    ):
        raise UserError(
            f"model: {type(model).__name__} changes its head's output (a bias, soft-capping or scaling), which the "
            "trainer does not reproduce yet; choose another architecture"
        )
