"""Rollouts to micro-batches: which tokens share a row, which rows share a micro-batch.

Whatever the layout and the split, the per-token views and the totals are the same, so the objective is too.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlpost.data.balance import deal_within
from rlpost.types import Completion, PackedBatch, PackedGroup, Rollout, StepTotals

Layout = Literal["shared_prefix", "padded"]


@dataclass(frozen=True)
class Piece:
    """A prompt and the rollouts (by index) whose completions stand behind it."""

    prompt_length: int
    rollout_ids: tuple[int, ...]
    length: int


def active_rollouts(rollouts: Sequence[Rollout], mask_truncated: bool) -> list[bool]:
    """Which rollouts give a gradient: all, or with `mask_truncated` those that the length limit has not cut."""
    return [not (mask_truncated and rollout.completion.finish_reason == "length") for rollout in rollouts]


def sampled_tokens(completion: Completion) -> torch.Tensor:
    """[length] bool: the tokens that the model sampled itself."""
    return torch.tensor(completion.sampled_mask or [True] * len(completion.token_ids))


def step_totals(rollouts: Sequence[Rollout], loss_masks: Sequence[bool], max_completion_tokens: int) -> StepTotals:
    """Totals of one rank's share; over ranks they add up. `loss_masks` says which rollouts count at all."""
    return StepTotals(
        num_sequences=len(rollouts),
        num_tokens=sum(_num_sampled(r) for r, kept in zip(rollouts, loss_masks, strict=True) if kept),
        max_completion_tokens=max_completion_tokens,
    )


def pack(
    rollouts: Sequence[Rollout],
    loss_masks: Sequence[bool],
    token_budget: int,
    layout: Layout = "shared_prefix",
) -> list[PackedBatch]:
    """Micro-batches of at most `token_budget` positions, padding counted, and of about the same size.

    A prompt and a completion that are over the budget together stand alone.

    Args:
        rollouts: in any order; those of a group share their prompt's positions in the shared_prefix layout.
        loss_masks: one a rollout; False masks all of its tokens. Those that were not sampled are masked anyway.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, rollout in enumerate(rollouts):
        groups[rollout.prompt.group_id].append(index)
    if layout == "padded":
        batches = _padded_rows([_piece(rollouts, [i]) for ids in groups.values() for i in ids], token_budget)
        return [_batch(pieces, rollouts, loss_masks, one_row=False) for pieces in batches]
    pieces = [piece for ids in groups.values() for piece in _split(rollouts, ids, token_budget)]
    parts = deal_within([piece.length for piece in pieces], token_budget)
    return [_batch([pieces[i] for i in part], rollouts, loss_masks, one_row=True) for part in parts]


def _piece(rollouts: Sequence[Rollout], members: Sequence[int]) -> Piece:
    prompt_length = len(rollouts[members[0]].prompt.token_ids)
    completions = sum(len(rollouts[i].completion.token_ids) for i in members)
    return Piece(prompt_length, tuple(members), prompt_length + completions)


def _split(rollouts: Sequence[Rollout], members: Sequence[int], token_budget: int) -> list[Piece]:
    """A group as pieces within the budget, each with the prompt again."""
    room = max(1, token_budget - len(rollouts[members[0]].prompt.token_ids))
    parts = deal_within([len(rollouts[i].completion.token_ids) for i in members], room)
    return [_piece(rollouts, [members[i] for i in part]) for part in parts]


def _padded_rows(pieces: Sequence[Piece], token_budget: int) -> list[list[Piece]]:
    batches: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.length):  # the newest piece's length is the batch's width
        if batches and (len(batches[-1]) + 1) * piece.length <= token_budget:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return batches


def _batch(
    pieces: Sequence[Piece], rollouts: Sequence[Rollout], loss_masks: Sequence[bool], one_row: bool
) -> PackedBatch:
    """The pieces one after another in one row, or in a row each, padded at the end."""
    lengths_of_pieces = [piece.length for piece in pieces]
    shape = (1, sum(lengths_of_pieces)) if one_row else (len(pieces), max(lengths_of_pieces))
    size = shape[0] * shape[1]
    input_ids = torch.zeros(size, dtype=torch.int64)
    position_ids = torch.zeros(size, dtype=torch.int64)
    group_index = torch.full((size,), -1, dtype=torch.int64)
    segment_index = torch.zeros(size, dtype=torch.int64)
    predictors, targets, sequence_index, token_index, masks, logprobs = [], [], [], [], [], []
    active_lengths, advantages, prompt_lengths, rollout_ids, groups = [], [], [], [], []
    prompts = [rollouts[piece.rollout_ids[0]].prompt for piece in pieces]

    place = 0
    for number, piece in enumerate(pieces):
        start = place if one_row else number * shape[1]
        prompt = prompts[number].token_ids
        n = len(prompt)
        lengths = tuple(len(rollouts[index].completion.token_ids) for index in piece.rollout_ids)
        groups.append(PackedGroup(start, n, lengths))
        group_index[start : start + piece.length] = number
        input_ids[start : start + n] = torch.tensor(prompt)
        position_ids[start : start + n] = torch.arange(n)
        place = start + n
        for segment, (index, length) in enumerate(zip(piece.rollout_ids, lengths, strict=True), start=1):
            completion = rollouts[index].completion
            here = slice(place, place + length)
            ids = torch.tensor(completion.token_ids)
            input_ids[here] = ids
            position_ids[here] = torch.arange(n, n + length)
            segment_index[here] = segment
            # The prompt's last position predicts every completion's first token.
            predictors.append(torch.tensor([start + n - 1, *range(place, place + length - 1)]))
            targets.append(ids)
            sequence_index.append(torch.full((length,), len(rollout_ids)))
            token_index.append(torch.arange(length))
            masks.append(sampled_tokens(completion) & loss_masks[index])
            logprobs.append(torch.tensor(completion.rollout_logprobs, dtype=torch.float32))
            active_lengths.append(int(masks[-1].sum()))
            advantages.append(rollouts[index].advantage)
            prompt_lengths.append(n)
            rollout_ids.append(index)
            place += length

    return PackedBatch(
        input_ids=input_ids.view(shape),
        position_ids=position_ids.view(shape),
        groups=groups if one_row else [],
        group_index=group_index.view(shape),
        segment_index=segment_index.view(shape),
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
        prompts=prompts,
    )


def _num_sampled(rollout: Rollout) -> int:
    sampled = rollout.completion.sampled_mask
    return len(rollout.completion.token_ids) if sampled is None else sum(sampled)


def empty_batch(layout: Layout = "shared_prefix") -> PackedBatch:
    """A micro-batch of one position and no token, for a rank that has none left while others do."""
    one, none = torch.zeros((1, 1), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=one,
        position_ids=one,
        groups=[PackedGroup(0, 1, ())] if layout == "shared_prefix" else [],
        group_index=one,
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
        prompts=[],
    )


def attention_mask(batch: PackedBatch) -> torch.Tensor:
    """[R, 1, W, W] bool: which earlier positions each position attends to, in plain words; padding to itself alone.

    What an attention function has to compute, however it goes about it.
    """
    width = batch.input_ids.shape[1]
    device = batch.input_ids.device
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    group, segment = batch.group_index, batch.segment_index
    same_group = group.unsqueeze(2) == group.unsqueeze(1)
    visible = (segment.unsqueeze(1) == 0) | (segment.unsqueeze(2) == segment.unsqueeze(1))
    padding = (group == -1).unsqueeze(2)
    mask = causal & same_group & visible & ~padding
    return (mask | torch.eye(width, dtype=torch.bool, device=device)).unsqueeze(1)
