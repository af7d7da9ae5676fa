"""The policy network: a transformers causal language model that answers with log-probabilities, sharded by FSDP2."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlpost.data.packing import attention_mask
from rlpost.errors import UserError
from rlpost.objective.logprobs import SamplingDistribution, token_logprobs
from rlpost.trainer.linear import use_onednn
from rlpost.types import PackedBatch

Precision = Literal["float32", "bfloat16"]


class TokenScorer(nn.Module):
    """Log-probability and entropy of a micro-batch's completion tokens.

    The head runs on the positions that predict a completion token only, and on a chunk of them at a time.
    """

    def __init__(self, language_model: nn.Module, distribution: SamplingDistribution) -> None:
        super().__init__()
        self.language_model = language_model
        self.distribution = distribution

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Returns: logprobs [T] and entropy [T] under the sampling distribution, both with gradient."""
        hidden = self.language_model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=attention_mask(batch),
            use_cache=False,
        ).last_hidden_state
        # Not hidden[index]: completions share their prompt's last position, and the gradient of plain indexing adds up
        # such repeats in whatever order the threads come, so a run would not repeat to the last bit.
        predicting = hidden.flatten(0, 1).index_select(0, batch.predictor_index)
        head = self.language_model.get_output_embeddings().weight
        return token_logprobs(predicting, head, batch.target_ids, self.distribution)


def load(directory: Path, trust_remote_code: bool = False) -> nn.Module:
    """A causal language model with float32 weights (the optimizer's masters), dropout off.

    Raises: UserError for an architecture whose logits are not its head's output alone.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="sdpa",  # takes the block mask of a packed row
        trust_remote_code=trust_remote_code,
    )
    model.eval()  # dropout would make sampling and training disagree; gradients flow all the same
    _check_plain_head(model)
    use_onednn(model)
    return model


def shard(
    model: nn.Module,
    distribution: SamplingDistribution,
    mesh: DeviceMesh,
    precision: Precision = "float32",
    activation_checkpointing: bool = False,
) -> TokenScorer:
    """Wrap and shard with `fully_shard`: a unit per block, and the root with embeddings and head.

    Gradients are summed over ranks, not averaged: the objective's weights hold the step's denominators already.
    """
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
        _disable_dropout(model)
    scorer = TokenScorer(model, distribution)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision == "bfloat16"
        else MixedPrecisionPolicy()
    )
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(scorer, mesh=mesh, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum
    return scorer


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, by the class names the architecture declares as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


@torch.no_grad()
def _check_plain_head(model: nn.Module) -> None:
    ids = torch.arange(4).unsqueeze(0) % model.config.get_text_config().vocab_size
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(
        hidden @ model.get_output_embeddings().weight.T, model(input_ids=ids, use_cache=False).logits, atol=1e-4
    ):
        raise UserError(
            f"model: {type(model).__name__} changes its head's output (a bias, soft-capping or scaling), which the "
            "trainer does not reproduce yet; choose another architecture"
        )
