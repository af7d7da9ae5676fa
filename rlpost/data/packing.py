"""Rollouts to micro-batches: which tokens share a row, which rows share a micro-batch.

Whatever the layout and the split, the per-token views and the totals are the same, so the objective is too.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlpost.types import PackedBatch, Rollout, StepTotals

Layout = Literal["shared_prefix", "padded"]


@dataclass(frozen=True)
class Row:
    """A prompt and the rollouts (by index) whose completions stand behind it."""

    prompt_length: int
    rollout_ids: tuple[int, ...]
    length: int


def step_totals(rollouts: Sequence[Rollout], loss_masks: Sequence[bool], max_completion_tokens: int) -> StepTotals:
    """Totals of one rank's share; over ranks they add up. `loss_masks` says which rollouts count at all."""
    return StepTotals(
        num_sequences=len(rollouts),
        num_tokens=sum(len(r.completion.token_ids) for r, kept in zip(rollouts, loss_masks, strict=True) if kept),
        max_completion_tokens=max_completion_tokens,
    )


def pack(
    rollouts: Sequence[Rollout],
    loss_masks: Sequence[bool],
    token_budget: int,
    layout: Layout = "shared_prefix",
) -> list[PackedBatch]:
    """Micro-batches of at most `token_budget` positions, padding counted; a longer single row stands alone.

    Args:
        rollouts: in any order; those of a group share their prompt's positions in the shared_prefix layout.
        loss_masks: one a rollout; False masks all of its tokens.
    """
    rows = sorted(_rows(rollouts, token_budget, layout), key=lambda row: row.length)
    batches: list[list[Row]] = []
    for row in rows:  # rows ascend, so this row's length is the width the batch would get
        if batches and (len(batches[-1]) + 1) * row.length <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_batch(rows, rollouts, loss_masks) for rows in batches]


def _rows(rollouts: Sequence[Rollout], token_budget: int, layout: Layout) -> Iterable[Row]:
    groups: dict[int, list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        groups[rollout.prompt.group_id].append(index)
    for members in groups.values():
        prompt_length = len(rollouts[members[0]].prompt.token_ids)
        held: list[int] = []
        length = prompt_length
        for index in members:
            size = len(rollouts[index].completion.token_ids)
            if held and (layout == "padded" or length + size > token_budget):
                yield Row(prompt_length, tuple(held), length)
                held, length = [], prompt_length
            held.append(index)
            length += size
        yield Row(prompt_length, tuple(held), length)


def _batch(rows: Sequence[Row], rollouts: Sequence[Rollout], loss_masks: Sequence[bool]) -> PackedBatch:
    width = max(row.length for row in rows)
    shape = (len(rows), width)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    group_index = torch.full(shape, -1, dtype=torch.int64)
    segment_index = torch.zeros(shape, dtype=torch.int64)
    predictors, targets, sequence_index, token_index, masks, logprobs = [], [], [], [], [], []
    active_lengths, advantages, prompt_lengths, rollout_ids = [], [], [], []

    for r, row in enumerate(rows):
        prompt = rollouts[row.rollout_ids[0]].prompt.token_ids
        n = len(prompt)
        input_ids[r, :n] = torch.tensor(prompt)
        position_ids[r, :n] = torch.arange(n)
        group_index[r, : row.length] = r
        start = n
        for segment, index in enumerate(row.rollout_ids, start=1):
            completion = rollouts[index].completion
            size = len(completion.token_ids)
            here = slice(start, start + size)
            ids = torch.tensor(completion.token_ids)
            input_ids[r, here] = ids
            position_ids[r, here] = torch.arange(n, n + size)
            segment_index[r, here] = segment
            # The prompt's last position predicts every completion's first token.
            predictors.append(r * width + torch.tensor([n - 1, *range(start, start + size - 1)]))
            targets.append(ids)
            sequence_index.append(torch.full((size,), len(rollout_ids)))
            token_index.append(torch.arange(size))
            masks.append(torch.full((size,), loss_masks[index]))
            logprobs.append(torch.tensor(completion.rollout_logprobs, dtype=torch.float32))
            active_lengths.append(size if loss_masks[index] else 0)
            advantages.append(rollouts[index].advantage)
            prompt_lengths.append(n)
            rollout_ids.append(index)
            start += size

    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        group_index=group_index,
        segment_index=segment_index,
        predictor_index=torch.cat(predictors),
        target_ids=torch.cat(targets),
        sequence_index=torch.cat(sequence_index),
        token_index=torch.cat(token_index),
        loss_mask=torch.cat(masks),
        rollout_logprobs=torch.cat(logprobs),
        active_lengths=torch.tensor(active_lengths),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        prompt_lengths=prompt_lengths,
        completion_masks=masks,
        rollout_ids=rollout_ids,
    )


def empty_batch() -> PackedBatch:
    """A micro-batch of one padding position and no token, for a rank that has none left while others do."""
    one, none = torch.zeros((1, 1), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=one,
        position_ids=one,
        group_index=one - 1,
        segment_index=one,
        predictor_index=none,
        target_ids=none,
        sequence_index=none,
        token_index=none,
        loss_mask=none.bool(),
        rollout_logprobs=none.float(),
        active_lengths=none,
        advantages=none.double(),
        prompt_lengths=[],
        completion_masks=[],
        rollout_ids=[],
    )


def attention_mask(batch: PackedBatch) -> torch.Tensor:
    """[R, 1, W, W] bool: which earlier positions each position attends to. Padding attends to itself alone."""
    width = batch.input_ids.shape[1]
    device = batch.input_ids.device
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    group, segment = batch.group_index, batch.segment_index
    same_group = group.unsqueeze(2) == group.unsqueeze(1)
    visible = (segment.unsqueeze(1) == 0) | (segment.unsqueeze(2) == segment.unsqueeze(1))
    padding = (group == -1).unsqueeze(2)
    mask = causal & same_group & visible & ~padding
    return (mask | torch.eye(width, dtype=torch.bool, device=device)).unsqueeze(1)
