"""The data of a step, in the order in which it flows: Example, Prompt, Completion, Rollout, PackedBatch, StepTotals.

Read this file first. Nothing here imports torch at run time, so the front door can use it.
Shapes: B sequences, T completion tokens in a micro-batch, R rows of W positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
IMAGE = "<image>"  # in a message's content: here stands an image


@dataclass(frozen=True)
class Example:
    """One row of a task, before any model sees it."""

    messages: tuple[Mapping[str, str], ...]  # chat messages: {"role": ..., "content": ...}
    answer: str | None  # the gold answer, None where the task has none
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])  # everything else rewards may want
    task: str = ""  # the task it is from, as in eval/<task>/accuracy
    images: tuple[
        str | bytes, ...
    ] = ()  # paths or contents of files, one for each IMAGE in the messages, in their order


@dataclass(frozen=True)
class Prompt:
    """An example as one model's token ids."""

    example: Example
    token_ids: tuple[int, ...]  # what the engine continues and the trainer conditions on
    text: str  # the same, as text
    completion_prefix: str = ""  # the end of `text` that belongs to the answer (and is not trained on)
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])  # settings of its own, in place of the run's
    group_id: int = -1  # given when the prompt is drawn; unique in the run, never derived from the text
    unexpanded_ids: tuple[int, ...] = ()  # with images: `token_ids` before the processor wrote each as a run of tokens

    @property
    def images(self) -> tuple[str | bytes, ...]:
        return self.example.images


@dataclass(frozen=True)
class Completion:
    """An engine's sample for a prompt: token in, token out, never tokenised again."""

    token_ids: tuple[int, ...]  # at least one; the end token included when one was sampled
    rollout_logprobs: tuple[float, ...]  # of each token, under the distribution it was sampled from
    text: str  # of the last turn, where there are several
    finish_reason: FinishReason  # "stop": an end token or stop string; "length": cut by the limit
    sampled_mask: tuple[bool, ...] | None = None  # which tokens the model sampled, replies between turns not; None: all
    messages: tuple[Mapping[str, str], ...] = ()  # of an episode: the model's turns and the replies to them
    environment_reward: float | None = None
    policy_version: int = 0  # the step whose weights sampled it (the oldest, of several); 0: the initial model


@dataclass
class Rollout:
    """One sample of one prompt, and what became of it."""

    prompt: Prompt
    completion: Completion
    sample_index: int  # 0 .. samples per prompt - 1
    rewards: dict[str, float] = field(default_factory=dict)  # per function, NaN where it does not apply
    reward: float = float("nan")  # weighted sum over the functions that apply
    reward_errors: dict[str, str] = field(default_factory=dict)  # functions that failed on it, and why
    advantage: float = 0.0
    is_trained_on: bool = True  # False: sampled and scored, but left out of training by a filter

    # What the trainer finds out about each token of the completion: [length] on the CPU, None where it was not asked.
    trainer_logprobs: Tensor | None = field(default=None, compare=False)  # float32, before the step's first update
    ref_logprobs: Tensor | None = field(default=None, compare=False)  # float32, by the reference model
    entropy: Tensor | None = field(default=None, compare=False)  # float32, in nats, before the step's first update
    has_policy_gradient: Tensor | None = field(default=None, compare=False)  # bool; None: all tokens

    @property
    def answer_text(self) -> str:
        """The whole answer as a reader sees it: the completion prefix and the sampled text after it.

        Where there are several turns it is the last one, which has no prefix before it.
        """
        later = sum(message["role"] == "assistant" for message in self.completion.messages) > 1
        return self.completion.text if later else self.prompt.completion_prefix + self.completion.text


@runtime_checkable
class Stateful(Protocol):
    """A part that remembers something from step to step. Checkpoints hold the state of every part that has these methods."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class StepTotals:
    """One optimizer step over all ranks, counted before anything is split. The only source of denominators."""

    num_sequences: int  # N: every sequence of the step, fully masked ones too
    num_tokens: int  # M: active tokens, those that the loss mask keeps
    max_completion_tokens: int  # L_max: the longest completion allowed


@dataclass(frozen=True)
class TokenView:
    """The view that losses, corrections and reducers have of a micro-batch's completion tokens."""

    sequence_index: Tensor  # [T] int64, in 0 .. B-1
    token_index: Tensor  # [T] int64, the token's index in its whole completion
    loss_mask: Tensor  # [T] bool
    active_lengths: Tensor  # [B] int64, active tokens of each whole sequence, however it was split
    prompt_lengths: Sequence[int]  # [B]
    completion_masks: Sequence[Tensor]  # [B] of [length] bool: the loss mask of each whole completion
    max_log_ratio: float = math.inf  # bound on the size of log-ratios that losses exponentiate


@dataclass(frozen=True)
class PackedGroup:
    """A prompt and the completions that follow it in a row."""

    start: int  # the prompt's first position
    prompt_length: int
    completion_lengths: tuple[int, ...]


@dataclass
class PackedBatch:
    """A micro-batch: rows for the model, and flat views over its completion tokens.

    A position of a row belongs to a segment: (group, 0) for a prompt and (group, k) for its k-th completion in
    that row. It attends to earlier positions of the same row with the same group that are in segment 0 or in
    its own segment. The shared_prefix layout is one row of groups, each a prompt with completions behind it, and has no
    padding; the padded layout has a row a completion, each with its own prompt, and padding of group -1.
    """

    input_ids: Tensor  # [R, W] int64, padding 0
    position_ids: Tensor  # [R, W] int64, restarting after the prompt for each completion
    groups: Sequence[PackedGroup]  # of the shared_prefix layout's one row; empty in the padded layout
    group_index: Tensor  # [R, W] int64, -1 for padding
    segment_index: Tensor  # [R, W] int64, 0 for prompt positions

    predictor_index: Tensor  # [T] int64 into [R * W]: the position whose output predicts the token
    target_ids: Tensor  # [T] int64
    sequence_index: Tensor  # [T] int64 in 0 .. B-1
    token_index: Tensor  # [T] int64, the token's index in its completion
    loss_mask: Tensor  # [T] bool
    rollout_logprobs: Tensor  # [T] float32

    active_lengths: Tensor  # [B] int64
    advantages: Tensor  # [B] float64
    prompt_lengths: Sequence[int]  # [B]
    completion_masks: Sequence[Tensor]  # [B] of [length] bool
    rollout_ids: Sequence[int]  # [B] index of each sequence among the rollouts that were packed
    prompts: Sequence[Prompt]  # [R] of the padded layout's rows, [number of groups] of the shared_prefix layout's

    old_logprobs: Tensor | None = None  # [T], by the trainer before the update; None: take the current ones
    ref_logprobs: Tensor | None = None  # [T], by the reference model; None: no reference
    has_policy_gradient: Tensor | None = None  # [T] bool; None: all (top-entropy mask)

    @property
    def tokens(self) -> TokenView:
        return TokenView(
            self.sequence_index,
            self.token_index,
            self.loss_mask,
            self.active_lengths,
            self.prompt_lengths,
            self.completion_masks,
        )

    @property
    def num_positions(self) -> int:
        return self.input_ids.numel()
