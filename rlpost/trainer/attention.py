"""Attention over a packed row: every completion sees its group's prompt and itself.

On CPUs the row is taken apart into its prompts and completions, each of which then costs what it would alone: a block
mask over the whole row would compute every completion against every other and throw that away. On GPUs FlexAttention
skips the blocks that its mask leaves out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from rlpost import distributed
from rlpost.types import PackedBatch, PackedGroup

PACKED = "rlpost_packed"
FLEX = "rlpost_flex"


@dataclass(frozen=True)
class _Completions:
    """The completions behind one prompt, padded to the longest: K of Q positions, each with P + Q keys."""

    queries: Tensor  # [K * Q] positions in the row; padding repeats a position
    keys: Tensor  # [K * (P + Q)]
    mask: Tensor  # [K, 1, Q, P + Q] bool
    kept: Tensor  # [tokens] positions in [K * Q] that are not padding, in the row's order


@dataclass(frozen=True)
class PackedPlan:
    """The positions of a row [1, S] that attend to one another, worked out once for all layers."""

    prompts: Sequence[slice]
    completions: Sequence[_Completions | None]  # one a prompt; None: it has none


def plan(groups: Sequence[PackedGroup], device: torch.device) -> PackedPlan:
    """Args: groups: consecutive, from position 0 to the end of the row."""
    prompts = [slice(group.start, group.start + group.prompt_length) for group in groups]
    return PackedPlan(prompts, [_completions(group, device) for group in groups])


def _completions(group: PackedGroup, device: torch.device) -> _Completions | None:
    if not group.completion_lengths:
        return None
    lengths = torch.tensor(group.completion_lengths)
    starts = group.start + group.prompt_length + lengths.cumsum(0) - lengths
    offsets = torch.arange(int(lengths.max()))
    real = offsets < lengths.unsqueeze(1)  # [K, Q]
    positions = torch.where(real, starts.unsqueeze(1) + offsets, starts.unsqueeze(1))
    prompt = torch.arange(group.start, group.start + group.prompt_length).expand(len(lengths), -1)
    # A real position's own and earlier positions are real; what padding sees does not matter, its output is dropped.
    causal = torch.ones(len(offsets), len(offsets), dtype=torch.bool).tril()
    mask = torch.cat([causal.new_ones(len(offsets), group.prompt_length), causal], dim=1)
    parts = (
        positions.flatten(),
        torch.cat([prompt, positions], dim=1).flatten(),
        mask.expand(len(lengths), 1, -1, -1),
        real.flatten().nonzero().flatten(),
    )
    return _Completions(*(part.to(device) for part in parts))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedPlan,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, H, S, D], key and value [1, H_kv, S, D] -> [1, S, H, D]."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, H, D]

    def attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """[K, Q, H, D] and twice [K, P, H_kv, D] -> [K, Q, H, D]."""
        grouped, dtype = q.shape[2] != k.shape[2], q.dtype
        if dtype == torch.bfloat16 and q.device.type == "cpu":  # twice as fast as the bf16 kernel, casts included
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=grouped, **how)
        return output.transpose(1, 2).to(dtype)

    def taken(x: Tensor, positions: Tensor, rows: int) -> Tensor:
        # index_select and not indexing: its gradient adds up repeated positions in a fixed order.
        return x.index_select(0, positions).unflatten(0, (rows, -1))

    outputs = []
    for at, completions in zip(packed.prompts, packed.completions, strict=True):
        outputs.append(attend(*(x[at].unsqueeze(0) for x in (query, key, value)), is_causal=True)[0])
        if completions is not None:
            rows = completions.mask.shape[0]
            q = taken(query, completions.queries, rows)
            k, v = taken(key, completions.keys, rows), taken(value, completions.keys, rows)
            output = attend(q, k, v, attn_mask=completions.mask)
            outputs.append(output.flatten(0, 1).index_select(0, completions.kept))
    return torch.cat(outputs).unsqueeze(0), None


def over_context(attention: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """The attention, also where ranks hold a part of the positions each: every rank computes whole rows for some heads.

    Heads of keys and values are repeated as far as the ranks need one each. See context.py.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, Any]:
        if not how.pop("in_context", False):
            return attention(module, query, key, value, attention_mask, **how)
        repeats = _repeats(query.shape[1], key.shape[1], distributed.context_size())
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        whole = (distributed.scatter_heads(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (query, key, value))
        output, _ = attention(module, *whole, attention_mask, **how)
        return distributed.gather_heads(output[0])[None], None

    return attend


def _repeats(num_heads: int, num_kv_heads: int, size: int) -> int:
    """The number of times that each head of keys and values has to be there for every rank to have those of its query heads."""
    per_head = num_heads // num_kv_heads
    return next(n for n in range(1, per_head + 1) if per_head % n == 0 and (num_kv_heads * n) % size == 0)


AttentionInterface.register(PACKED, over_context(packed_attention))
AttentionInterface.register(FLEX, over_context(flex_attention_forward))


def block_mask(batch: PackedBatch) -> Any:
    """FlexAttention's block mask of a packed row, for GPUs."""
    from torch.nn.attention.flex_attention import create_block_mask

    group, segment = batch.group_index[0], batch.segment_index[0]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shared = (segment[k] == 0) | (segment[k] == segment[q])
        return (q >= k) & (group[q] == group[k]) & shared

    size = batch.input_ids.shape[1]
    return create_block_mask(visible, None, None, size, size, device=batch.input_ids.device)
