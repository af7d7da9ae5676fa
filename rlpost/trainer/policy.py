"""The policy: log-probabilities where they are needed, and the updates of a step."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpost import distributed
from rlpost.config.schema import AlgorithmConfig
from rlpost.data.packing import active_rollouts, empty_batch, pack, sampled_tokens, step_totals
from rlpost.objective.metrics import Mean, Metric, joined, over_optimizer_steps
from rlpost.objective.objective import Objective
from rlpost.trainer.lora import WithoutAdapters, merged
from rlpost.trainer.model import PolicyModel
from rlpost.trainer.optimizer import Optimizer
from rlpost.types import PackedBatch, Rollout

# What a micro-batch carries of its rollouts' per-token values: its field, the rollout's, and the type of none at all.
PER_TOKEN = {
    "old_logprobs": ("trainer_logprobs", torch.float32),
    "ref_logprobs": ("ref_logprobs", torch.float32),
    "has_policy_gradient": ("has_policy_gradient", torch.bool),
}


class EngineMismatchError(RuntimeError):
    """The engine that sampled and the trainer disagree on the probability of the same tokens."""


class Policy:
    """A sharded model, its reference, its optimizer, and the objective that updates it."""

    def __init__(
        self,
        model: PolicyModel,
        reference: PolicyModel | WithoutAdapters | None,
        objective: Objective,
        optimizer: Optimizer,
        algorithm: AlgorithmConfig,
        *,
        micro_batch_tokens: int,
        max_completion_tokens: int,
        max_logprob_diff: float | None,
        seed: int,
    ) -> None:
        """Make a policy.

        Args:
            algorithm: its mini-batches, epochs and masks are read here.
            micro_batch_tokens: positions a micro-batch may hold, padding counted.
            max_completion_tokens: the longest completion allowed.
            max_logprob_diff: a larger difference between engine and trainer stops the run; None never does. Completions
                by older weights than the trainer's are not held to it.
            seed: the seed of the order in which groups are dealt into mini-batches.
        """
        self.model = model
        self.reference = reference
        self.optimizer = optimizer
        self._objective = objective
        self._algorithm = algorithm
        self._micro_batch_tokens = micro_batch_tokens
        self._max_completion_tokens = max_completion_tokens
        self._max_logprob_diff = max_logprob_diff
        self._seed = seed

    def update(self, rollouts: Sequence[Rollout], group_ids: Sequence[int], step: int) -> dict[str, float]:
        """All optimizer steps of one rollout batch.

        Args:
            rollouts: this rank's share, advantages set.
            group_ids: every group of the step over all ranks, so that all ranks deal them out alike.
            step: the loop's step, which with the seed decides the mini-batches.

        Sets: the rollouts' per-token values (`trainer_logprobs` and, where they are needed, the others).

        Returns: metrics of the step, the same on every rank: sequence means averaged over the optimizer steps,
            largest values over all of them.

        Raises:
            EngineMismatchError: before any weight changes.
            FloatingPointError: the gradient or a log-probability is not finite; before that optimizer step.
        """
        started = time.perf_counter()
        # Completions by older weights differ from the trainer's by more than rounding.
        stale = distributed.any_rank(any(r.completion.policy_version != step - 1 for r in rollouts))
        max_logprob_diff = None if stale else self._max_logprob_diff
        attached = self._set_token_values(rollouts)
        steps: list[dict[str, Metric]] = []
        positions = 0
        for mini_batch in self._mini_batches(rollouts, group_ids, step):
            idle = self._without_gradient(mini_batch)
            batches = self._pack([r for i, r in enumerate(mini_batch) if i not in idle], attached)
            idle_batches = self._pack([mini_batch[i] for i in sorted(idle)], attached)
            positions += sum(batch.num_positions for batch, _ in [*batches, *idle_batches])
            steps.append(self._optimizer_step(mini_batch, batches, idle_batches, max_logprob_diff))
        seconds = time.perf_counter() - started
        self._move_reference(step)
        throughput = distributed.sum_over_data({"positions": positions})["positions"] / seconds
        return {**over_optimizer_steps(steps), "train/tokens_per_s": throughput}

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """The current policy's log-probabilities of each completion's tokens, [length] float32 on the CPU, in nats.

        All ranks call it together, each with rollouts of its own.
        """
        return [logprobs for logprobs, _ in self._score(self.model, rollouts)]

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """`logprobs` by the reference model, which there has to be."""
        assert self.reference is not None
        return [logprobs for logprobs, _ in self._score(self.reference, rollouts)]

    def sequence_kl(self, rollouts: Sequence[Rollout]) -> list[float]:
        """k1 summed over each rollout's tokens: log-probability of the completion less the reference's, in nats."""
        shares = distributed.gather_in_context(list(rollouts))  # its ranks score the same rows
        together = [rollout for share in shares for rollout in share]
        ours, theirs = self.logprobs(together), self.reference_logprobs(together)
        first = sum(len(share) for share in shares[: distributed.context_rank()])
        return [
            (ours[i] - theirs[i])[sampled_tokens(rollout.completion)].sum().item()
            for i, rollout in enumerate(rollouts, first)
        ]

    @property
    def moves_reference(self) -> bool:
        """True if the reference has weights of its own that a checkpoint must hold."""
        return self.reference is not None and self._objective.kl.moves_reference

    @property
    def hooks(self) -> dict[str, Any]:
        """The parts of the objective that a configuration names."""
        return self._objective.hooks

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, under its name in the model's directory; a tied one once, adapters merged."""
        for name, weight in merged(self.model):
            yield name.removeprefix("language_model."), weight

    def _set_token_values(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Find out what the update has to know of each token. Returns: the micro-batch fields that hold it."""
        a = self._algorithm
        for rollout in rollouts:
            rollout.trainer_logprobs = rollout.ref_logprobs = rollout.entropy = rollout.has_policy_gradient = None
        attached = []
        if a.num_mini_batches * a.num_epochs > 1 or a.top_entropy_share is not None:
            for rollout, scored in zip(rollouts, self._score(self.model, rollouts), strict=True):
                rollout.trainer_logprobs, rollout.entropy = scored
            attached.append("old_logprobs")
        if a.top_entropy_share is not None:
            self._mark_top_entropy(rollouts, a.top_entropy_share)
            attached.append("has_policy_gradient")
        if self.reference is not None:
            for rollout, logprobs in zip(rollouts, self.reference_logprobs(rollouts), strict=True):
                rollout.ref_logprobs = logprobs
            attached.append("ref_logprobs")
        return attached

    def _mini_batches(
        self, rollouts: Sequence[Rollout], group_ids: Sequence[int], step: int
    ) -> Iterator[list[Rollout]]:
        """This rank's part of each optimizer step."""
        a = self._algorithm
        for epoch in range(a.num_epochs):
            order = np.random.default_rng([self._seed, step, epoch]).permutation(sorted(group_ids))
            for groups in np.array_split(order, a.num_mini_batches):
                if len(groups):  # a filter may have left fewer groups than mini-batches
                    chosen = set(groups.tolist())
                    yield [rollout for rollout in rollouts if rollout.prompt.group_id in chosen]

    def _without_gradient(self, rollouts: Sequence[Rollout]) -> set[int]:
        """The rollouts whose whole group is masked or has the advantage 0, if the objective takes only metrics from them."""
        if not self._objective.is_zero_at_zero_advantage:
            return set()
        active = {
            rollout.prompt.group_id
            for rollout, is_active in zip(rollouts, self._loss_masks(rollouts), strict=True)
            if is_active and rollout.advantage != 0
        }
        return {i for i, rollout in enumerate(rollouts) if rollout.prompt.group_id not in active}

    def _loss_masks(self, rollouts: Sequence[Rollout]) -> list[bool]:
        return active_rollouts(rollouts, self._algorithm.mask_truncated)

    def _pack(
        self, rollouts: Sequence[Rollout], attached: Sequence[str] = ()
    ) -> list[tuple[PackedBatch, list[Rollout]]]:
        """Micro-batches, as many as on every other rank, and the rollouts in each, in the order of its sequences.

        Args: attached: the fields of PER_TOKEN that the rollouts hold.
        """
        layout = self.model.layout
        batches = pack(rollouts, self._loss_masks(rollouts), self._micro_batch_tokens, layout)
        num_batches = int(distributed.max_over_ranks({"n": len(batches)})["n"])
        batches += [empty_batch(layout) for _ in range(num_batches - len(batches))]
        packed = []
        for batch in batches:
            members = [rollouts[i] for i in batch.rollout_ids]
            values = {}
            for name in attached:
                source, dtype = PER_TOKEN[name]
                values[name] = torch.cat([torch.zeros(0, dtype=dtype), *(getattr(r, source) for r in members)])
            packed.append((replace(batch, **values), members))
        return packed

    @torch.no_grad()
    def _score(self, model: PolicyModel | WithoutAdapters, rollouts: Sequence[Rollout]) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies at every rollout's completion tokens."""
        scored: dict[int, tuple[Tensor, Tensor]] = {}
        for batch, _ in self._pack(rollouts):
            logprobs, entropy = (split(batch, values) for values in model(to_device(batch)))
            scored.update(zip(batch.rollout_ids, zip(logprobs, entropy, strict=True), strict=True))
        model.shard_again()
        return [scored[i] for i in range(len(rollouts))]

    def _mark_top_entropy(self, rollouts: Sequence[Rollout], share: float) -> None:
        """Set which tokens lie in the top share of the whole step's entropies, over all ranks; ties are kept."""
        active = [
            rollout.entropy[sampled_tokens(rollout.completion)]
            for rollout, is_active in zip(rollouts, self._loss_masks(rollouts), strict=True)
            if is_active and rollout.entropy is not None
        ]
        everyones = torch.cat(
            [torch.zeros(0), *(values for part in distributed.gather_over_data(active) for values in part)]
        )
        count = math.ceil(Fraction(repr(share)) * len(everyones))  # 0.07 of 100 is 7: no float's product is
        threshold = everyones.topk(count).values[-1] if count else float("inf")
        for rollout in rollouts:
            assert rollout.entropy is not None  # scored before
            rollout.has_policy_gradient = rollout.entropy >= threshold

    def _move_reference(self, step: int) -> None:
        kl = self._objective.kl
        if not isinstance(self.reference, PolicyModel) or not kl.reference_every or step % kl.reference_every:
            return
        with torch.no_grad():
            for theirs, ours in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                theirs.lerp_(ours, kl.reference_mix)

    def _optimizer_step(
        self,
        rollouts: Sequence[Rollout],
        batches: Sequence[tuple[PackedBatch, list[Rollout]]],
        idle_batches: Sequence[tuple[PackedBatch, list[Rollout]]],
        max_logprob_diff: float | None,
    ) -> dict[str, Metric]:
        """One optimizer step over all of the batches; the idle ones add to the metrics and have no gradient.

        Sets: `trainer_logprobs` of the rollouts where no earlier pass has computed them.
        """
        totals = distributed.sum_totals(step_totals(rollouts, self._loss_masks(rollouts), self._max_completion_tokens))
        parts: list[Mapping[str, Metric]] = []

        def run(batch: PackedBatch, members: Sequence[Rollout]) -> Tensor:
            batch = to_device(batch)
            logprobs, entropy = self.model(batch)
            if batch.old_logprobs is None:
                for rollout, values in zip(members, split(batch, logprobs.detach()), strict=True):
                    rollout.trainer_logprobs = values
            output = self._objective(batch, logprobs, entropy, totals)
            parts.append(joined([output.metrics]))
            return output.loss

        self.optimizer.zero_grad()
        if idle_batches:
            with torch.no_grad():
                for batch, members in idle_batches:
                    run(batch, members)
            self.model.shard_again()
        for number, (batch, members) in enumerate(batches, start=1):
            self.model.hold_gradients(number < len(batches))
            run(batch, members).backward()
        metrics = distributed.over_ranks(joined(parts))
        _check(metrics, max_logprob_diff)
        if not batches:  # the optimizer's moments decay all the same
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        return {**metrics, **{name: Mean(value) for name, value in self.optimizer.step().items()}}


def _check(metrics: Mapping[str, Metric], max_logprob_diff: float | None) -> None:
    """Raises: FloatingPointError, EngineMismatchError."""
    if np.isnan(metrics["policy/ratio_max"].value):
        raise FloatingPointError("a log-probability is not a number: the run has diverged; lower optimizer.lr")
    gap = metrics["rollout/logprob_diff_max"].value
    if max_logprob_diff is not None and not gap <= max_logprob_diff:
        raise EngineMismatchError(
            f"rollout/logprob_diff_max={gap:.3g} is over rollout.max_logprob_diff={max_logprob_diff:g}: the "
            "engine samples from other weights or in another precision than the trainer trains, so the "
            "policy gradient would be biased; raise the bound only if that is meant"
        )


def split(batch: PackedBatch, values: Tensor) -> tuple[Tensor, ...]:
    """Values [T] as those of each sequence, on the CPU."""
    sizes = torch.bincount(batch.sequence_index, minlength=len(batch.rollout_ids)).tolist()
    return values.cpu().split(sizes)


def to_device(batch: PackedBatch) -> PackedBatch:
    """The same micro-batch with its tensors on this rank's device."""
    device = distributed.device()
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, Tensor)})
