"""The policy: log-probabilities where they are needed, and the updates of a step."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from rlpost import distributed
from rlpost.data.packing import empty_batch, pack, step_totals
from rlpost.objective.objective import Objective
from rlpost.trainer.lora import WithoutAdapters, merged
from rlpost.trainer.model import TokenScorer
from rlpost.types import PackedBatch, Rollout


class EngineMismatchError(RuntimeError):
    """The engine that sampled and the trainer disagree on the probability of the same tokens."""


@dataclass(frozen=True)
class UpdateSettings:
    """How a step's rollouts become optimizer steps.

    Attributes:
        num_mini_batches, num_epochs: optimizer steps a rollout batch makes: their product.
        micro_batch_tokens: positions a micro-batch may hold, padding counted.
        max_grad_norm: bound on the gradient's 2-norm; None clips nothing.
        mask_truncated: completions cut by the length limit give no gradient.
        top_entropy_share: this share of the step's active tokens, those of the highest entropy, gives a policy gradient
            (arXiv:2506.01939); None: all.
        reference_every, reference_mix: every so many steps the reference moves this share of the way to the policy
            (arXiv:2404.09656); 0 never does.
        max_logprob_diff: a larger difference between engine and trainer stops the run; None never does. Not of completions
            by older weights than the trainer's.
        seed: of the order in which groups are dealt into mini-batches.
    """

    max_completion_tokens: int
    num_mini_batches: int = 1
    num_epochs: int = 1
    micro_batch_tokens: int = 2048
    max_grad_norm: float | None = 1.0
    mask_truncated: bool = False
    top_entropy_share: float | None = None
    reference_every: int = 0
    reference_mix: float = 1.0
    max_logprob_diff: float | None = None
    seed: int = 0


class Policy:
    """A sharded model, its reference, its optimizer, and the objective that updates it."""

    def __init__(
        self,
        scorer: TokenScorer,
        reference: TokenScorer | WithoutAdapters | None,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        settings: UpdateSettings,
    ) -> None:
        self.scorer = scorer
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.reference = reference
        self._objective = objective
        self._settings = settings

    def update(self, rollouts: Sequence[Rollout], group_ids: Sequence[int], step: int) -> dict[str, float]:
        """All optimizer steps of one rollout batch.

        Args:
            rollouts: this rank's share, advantages set.
            group_ids: every group of the step over all ranks, so that all ranks deal them out alike.
            step: the loop's step, which with the seed decides the mini-batches.

        Sets: `trainer_logprobs` of the rollouts.

        Returns: metrics of the step, the same on every rank: sequence means averaged over the optimizer steps,
            largest values over all of them.

        Raises:
            EngineMismatchError: before any weight changes.
            FloatingPointError: the gradient or a log-probability is not finite; before that optimizer step.
        """
        s = self._settings
        started = time.perf_counter()
        # Completions by older weights differ from the trainer's by more than rounding.
        stale = distributed.any_rank(any(r.completion.policy_version != step - 1 for r in rollouts))
        max_logprob_diff = None if stale else s.max_logprob_diff
        attached: dict[str, dict[int, Tensor]] = {}
        if s.num_mini_batches * s.num_epochs > 1 or s.top_entropy_share is not None:
            attached["old_logprobs"], entropy = self._score(self.scorer, rollouts)
            if s.top_entropy_share is not None:
                attached["keep"] = self._top_entropy(rollouts, entropy, s.top_entropy_share)
        if self.reference is not None:
            attached["ref_logprobs"], _ = self._score(self.reference, rollouts)
        before: dict[int, Tensor] = dict(attached.get("old_logprobs", {}))

        means: dict[str, list[float]] = defaultdict(list)
        maxima: dict[str, list[float]] = defaultdict(list)
        positions = 0
        for epoch in range(s.num_epochs):
            order = np.random.default_rng([s.seed, step, epoch]).permutation(sorted(group_ids))
            for groups in np.array_split(order, s.num_mini_batches):
                if not len(groups):  # a filter left fewer groups than mini-batches
                    continue
                chosen = set(groups.tolist())
                members = [i for i, rollout in enumerate(rollouts) if rollout.prompt.group_id in chosen]
                idle = self._without_gradient(rollouts, members)
                batches = self._pack(rollouts, [i for i in members if i not in idle], attached)
                idle_batches = self._pack(rollouts, sorted(idle), attached)
                positions += sum(batch.num_positions for batch in [*batches, *idle_batches])
                chosen_rollouts = [rollouts[i] for i in members]
                step_means, step_maxima = self._optimizer_step(
                    chosen_rollouts, batches, idle_batches, before, max_logprob_diff
                )
                for name, value in step_means.items():
                    means[name].append(value)
                for name, value in step_maxima.items():
                    maxima[name].append(value)
        for index, logprobs in before.items():
            rollouts[index].trainer_logprobs = tuple(logprobs.tolist())
        seconds = time.perf_counter() - started
        self._refresh_reference(step)
        weight, grpo_weight = means.pop("objective/pg_weight"), means.pop("objective/pg_weight_grpo")
        return {
            "objective/pg_scale": sum(weight) / sum(grpo_weight) if sum(grpo_weight) else float("nan"),
            **{name: sum(values) / len(values) for name, values in means.items()},
            **{name: max(values) for name, values in maxima.items()},
            "train/tokens_per_s": distributed.sum_over_data({"positions": positions})["positions"] / seconds,
        }

    @property
    def reference_moves(self) -> bool:
        """Whether the reference has weights of its own that a checkpoint must hold."""
        return self.reference is not None and self._settings.reference_every > 0

    def sequence_kl(self, rollouts: Sequence[Rollout]) -> list[float]:
        """k1 summed over each rollout's tokens: log-probability of the completion less the reference's, in nats."""
        assert self.reference is not None
        shares = distributed.gather_in_context(list(rollouts))  # its ranks score the same rows
        together = [rollout for share in shares for rollout in share]
        (logprobs, _), (ref_logprobs, _) = self._score(self.scorer, together), self._score(self.reference, together)
        first = sum(len(share) for share in shares[: distributed.context_rank()])
        return [
            (logprobs[i] - ref_logprobs[i])[_sampled(rollout)].sum().item() for i, rollout in enumerate(rollouts, first)
        ]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, under its name in the model's directory; a tied one once, adapters merged."""
        for name, weight in merged(self.scorer):
            yield name.removeprefix("language_model."), weight

    def _without_gradient(self, rollouts: Sequence[Rollout], members: Sequence[int]) -> set[int]:
        """Those whose whole group is masked or has the advantage 0, if the objective takes only metrics from them."""
        if not self._objective.is_zero_at_zero_advantage:
            return set()
        kept = self._loss_masks(rollouts)
        active = {rollouts[i].prompt.group_id for i in members if kept[i] and rollouts[i].advantage != 0}
        return {i for i in members if rollouts[i].prompt.group_id not in active}

    def _loss_masks(self, rollouts: Sequence[Rollout]) -> list[bool]:
        masked = self._settings.mask_truncated
        return [not (masked and rollout.completion.finish_reason == "length") for rollout in rollouts]

    def _pack(
        self, rollouts: Sequence[Rollout], members: Sequence[int], attached: Mapping[str, Mapping[int, Tensor]]
    ) -> list[PackedBatch]:
        """Micro-batches of the chosen rollouts, as many as on every other rank, with known per-token values.

        Their `rollout_ids` are places in `rollouts`.
        """
        chosen = [rollouts[i] for i in members]
        s = self._settings
        layout = self.scorer.layout
        batches = pack(chosen, self._loss_masks(chosen), s.micro_batch_tokens, layout)
        num_batches = int(distributed.max_over_ranks({"n": len(batches)})["n"])
        batches += [empty_batch(layout) for _ in range(num_batches - len(batches))]

        def joined(name: str, batch: PackedBatch) -> Tensor:
            parts = [attached[name][i] for i in batch.rollout_ids]
            return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool if name == "keep" else torch.float32)

        batches = [replace(batch, rollout_ids=[members[i] for i in batch.rollout_ids]) for batch in batches]
        return [replace(batch, **{name: joined(name, batch) for name in attached}) for batch in batches]

    @torch.no_grad()
    def _score(
        self, scorer: TokenScorer | WithoutAdapters, rollouts: Sequence[Rollout]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Log-probabilities and entropies at every rollout's completion tokens, by index."""
        scored: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for batch in self._pack(rollouts, range(len(rollouts)), {}):
            for values, into in zip(scorer(to_device(batch)), scored, strict=True):
                into.update(_by_sequence(batch, values))
        scorer.shard_again()
        return scored

    def _top_entropy(
        self, rollouts: Sequence[Rollout], entropy: Mapping[int, Tensor], share: float
    ) -> dict[int, Tensor]:
        """Which tokens lie in the top share of the whole step's entropies, over all ranks; ties are kept."""
        kept = self._loss_masks(rollouts)
        active = [entropy[i][_sampled(rollout)] for i, rollout in enumerate(rollouts) if kept[i]]
        everyones = torch.cat(
            [torch.zeros(0), *(values for part in distributed.gather_over_data(active) for values in part)]
        )
        count = math.ceil(share * len(everyones))
        threshold = everyones.topk(count).values[-1] if count else float("inf")
        return {i: values >= threshold for i, values in entropy.items()}

    def _refresh_reference(self, step: int) -> None:
        s = self._settings
        if self.reference is None or not s.reference_every or step % s.reference_every:
            return
        with torch.no_grad():
            for ours, theirs in zip(self.reference.parameters(), self.scorer.parameters(), strict=True):
                ours.lerp_(theirs, s.reference_mix)

    def _optimizer_step(
        self,
        rollouts: Sequence[Rollout],
        batches: Sequence[PackedBatch],
        idle_batches: Sequence[PackedBatch],
        before: dict[int, Tensor],
        max_logprob_diff: float | None,
    ) -> tuple[dict[str, float], dict[str, float]]:
        """One optimizer step over all of the batches; the idle ones add to the metrics and have no gradient.

        Args: before: gets the log-probabilities of each sequence where no earlier pass has computed them.
        """
        s = self._settings
        totals = distributed.sum_totals(step_totals(rollouts, self._loss_masks(rollouts), s.max_completion_tokens))
        sums: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = defaultdict(float)

        def run(batch: PackedBatch) -> Tensor:
            logprobs, entropy = self.scorer(batch)
            if batch.old_logprobs is None:
                before.update(_by_sequence(batch, logprobs.detach()))
            output = self._objective(batch, logprobs, entropy, totals)
            for name, value in output.sums.items():
                sums[name] += value.item()
            for name, value in output.maxima.items():
                maxima[name] = float(np.maximum(maxima[name], value.item()))  # keeps a NaN
            return output.loss

        self.optimizer.zero_grad()
        if idle_batches:
            with torch.no_grad():
                for batch in map(to_device, idle_batches):
                    run(batch)
            self.scorer.shard_again()
        for number, batch in enumerate(batches, start=1):
            self.scorer.hold_gradients(number < len(batches))
            run(to_device(batch)).backward()
        sums, maxima = distributed.sum_over_data(sums), distributed.max_over_ranks(maxima)

        if np.isnan(maxima["policy/ratio_max"]):
            raise FloatingPointError("a log-probability is not a number: the run has diverged; lower optimizer.lr")
        gap = maxima["rollout/logprob_diff_max"]
        if max_logprob_diff is not None and not gap <= max_logprob_diff:
            raise EngineMismatchError(
                f"rollout/logprob_diff_max={gap:.3g} is over rollout.max_logprob_diff={max_logprob_diff:g}: the "
                "engine samples from other weights or in another precision than the trainer trains, so the "
                "policy gradient would be biased; raise the bound only if that is meant"
            )
        parameters = [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]
        if not batches:  # the optimizer's moments decay all the same
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        bound = float("inf") if s.max_grad_norm is None else s.max_grad_norm
        norm = distributed.full(torch.nn.utils.clip_grad_norm_(parameters, bound)).item()
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}: the run has diverged (the weights are still those of the last "
                "step); lower optimizer.lr or optimizer.max_grad_norm"
            )
        sums["policy/grad_norm"] = norm
        sums["policy/lr"] = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        return sums, maxima


def _sampled(rollout: Rollout) -> Tensor:
    """[length] bool: the tokens that the model sampled itself."""
    completion = rollout.completion
    return torch.tensor(completion.sampled or [True] * len(completion.token_ids))


def _by_sequence(batch: PackedBatch, values: Tensor) -> dict[int, Tensor]:
    """Values [T] as those of each sequence, on the CPU, by its place among the rollouts."""
    sizes = torch.bincount(batch.sequence_index, minlength=len(batch.rollout_ids)).tolist()
    return dict(zip(batch.rollout_ids, values.cpu().split(sizes), strict=True))


def to_device(batch: PackedBatch) -> PackedBatch:
    device = distributed.device()
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: t.to(device) for n, t in tensors.items() if isinstance(t, Tensor)})


def make_optimizer(
    scorer: TokenScorer, lr: float, betas: Sequence[float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) over float32 weights; norms and biases are not decayed."""
    parameters = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)  # one pass over memory, not ten


def make_scheduler(
    optimizer: torch.optim.Optimizer, schedule: str, warmup_steps: int, num_optimizer_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Learning rate over optimizer steps: a linear warm-up, then constant, linear or cosine down to zero.

    The factors are those of transformers' get_scheduler, whose import takes a second that every start of a run would pay.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        left = num_optimizer_steps - warmup_steps
        if schedule == "linear":
            return max(0.0, (num_optimizer_steps - step) / max(1, left))
        if schedule == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup_steps) / max(1, left)))))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
