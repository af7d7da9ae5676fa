"""Rollouts to micro-batches: which tokens share a row, which rows share a micro-batch.

Whatever the layout and the split, the per-token views and the totals are the same, so the objective is too.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlpost.data.balance import deal_within
from rlpost.types import Completion, PackedBatch, PackedGroup, Prompt, Rollout, StepTotals

Layout = Literal["shared_prefix", "padded"]


@dataclass(frozen=True)
class Piece:
    """A prompt and the rollouts (by index) whose completions stand behind it."""

    prompt_length: int
    rollout_ids: tuple[int, ...]
    length: int


def active_rollouts(rollouts: Sequence[Rollout], mask_truncated: bool) -> list[bool]:
    """The rollouts that give a gradient are all, or with `mask_truncated` those that the length limit has not cut."""
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


class _Rows:
    """Rows of tokens that fill up piece by piece, and what is known of each completion token in them."""

    def __init__(self, shape: tuple[int, int]) -> None:
        size = shape[0] * shape[1]
        self._shape = shape
        self._input_ids = torch.zeros(size, dtype=torch.int64)
        self._position_ids = torch.zeros(size, dtype=torch.int64)
        self._group_index = torch.full((size,), -1, dtype=torch.int64)
        self._segment_index = torch.zeros(size, dtype=torch.int64)
        self._groups: list[PackedGroup] = []
        self._tokens: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._sequences: dict[str, list[Any]] = defaultdict(list)

    def prompt(self, start: int, prompt: tuple[int, ...], completion_lengths: tuple[int, ...]) -> None:
        """A piece begins at `start` with its prompt."""
        n = len(prompt)
        self._group_index[start : start + n + sum(completion_lengths)] = len(self._groups)
        self._groups.append(PackedGroup(start, n, completion_lengths))
        self._input_ids[start : start + n] = torch.tensor(prompt)
        self._position_ids[start : start + n] = torch.arange(n)

    def completion(self, start: int, segment: int, rollout: Rollout, rollout_id: int, mask: torch.Tensor) -> None:
        """A completion of the newest piece stands at `start`."""
        group, completion = self._groups[-1], rollout.completion
        n, length = group.prompt_length, len(completion.token_ids)
        ids = torch.tensor(completion.token_ids)
        here = slice(start, start + length)
        self._input_ids[here] = ids
        self._position_ids[here] = torch.arange(n, n + length)
        self._segment_index[here] = segment
        tokens, sequences = self._tokens, self._sequences
        # The prompt's last position predicts every completion's first token.
        tokens["predictor_index"].append(torch.tensor([group.start + n - 1, *range(start, start + length - 1)]))
        tokens["target_ids"].append(ids)
        tokens["sequence_index"].append(torch.full((length,), len(sequences["rollout_ids"])))
        tokens["token_index"].append(torch.arange(length))
        tokens["loss_mask"].append(mask)
        tokens["rollout_logprobs"].append(torch.tensor(completion.rollout_logprobs, dtype=torch.float32))
        sequences["active_lengths"].append(int(mask.sum()))
        sequences["advantages"].append(rollout.advantage)
        sequences["prompt_lengths"].append(n)
        sequences["completion_masks"].append(mask)
        sequences["rollout_ids"].append(rollout_id)

    def batch(self, prompts: Sequence[Prompt], one_row: bool) -> PackedBatch:
        sequences = self._sequences
        return PackedBatch(
            input_ids=self._input_ids.view(self._shape),
            position_ids=self._position_ids.view(self._shape),
            groups=self._groups if one_row else [],
            group_index=self._group_index.view(self._shape),
            segment_index=self._segment_index.view(self._shape),
            **{name: torch.cat(parts) for name, parts in self._tokens.items()},
            active_lengths=torch.tensor(sequences["active_lengths"]),
            advantages=torch.tensor(sequences["advantages"], dtype=torch.float64),
            prompt_lengths=sequences["prompt_lengths"],
            completion_masks=sequences["completion_masks"],
            rollout_ids=sequences["rollout_ids"],
            prompts=prompts,
        )


def _batch(
    pieces: Sequence[Piece], rollouts: Sequence[Rollout], loss_masks: Sequence[bool], one_row: bool
) -> PackedBatch:
    """The pieces one after another in one row, or in a row each, padded at the end."""
    lengths = [piece.length for piece in pieces]
    width = sum(lengths) if one_row else max(lengths)
    rows = _Rows((1, width) if one_row else (len(pieces), width))
    prompts = [rollouts[piece.rollout_ids[0]].prompt for piece in pieces]
    end = 0
    for number, (piece, prompt) in enumerate(zip(pieces, prompts, strict=True)):
        start = end if one_row else number * width
        members = [rollouts[index] for index in piece.rollout_ids]
        rows.prompt(start, prompt.token_ids, tuple(len(r.completion.token_ids) for r in members))
        end = start + len(prompt.token_ids)
        for segment, (index, rollout) in enumerate(zip(piece.rollout_ids, members, strict=True), start=1):
            rows.completion(end, segment, rollout, index, sampled_tokens(rollout.completion) & loss_masks[index])
            end += len(rollout.completion.token_ids)
    return rows.batch(prompts, one_row)


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
