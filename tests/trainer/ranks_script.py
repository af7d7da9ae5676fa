"""Run under torchrun: gradients of every reducer in float64, under every way to arrange the ranks; rank 0 saves them.

torchrun --nproc-per-node=N -m tests.trainer.ranks_script OUT
"""

import sys
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from rlpost import distributed
from rlpost.config.schema import AlgorithmConfig, KLConfig, LoRAConfig, TrainerConfig
from rlpost.models.tiny import TinyLlama
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.objective.objective import Objective
from rlpost.trainer import model as trainer_model
from rlpost.trainer.lora import WithoutAdapters, add_adapters
from rlpost.trainer.optimizer import AdamW
from rlpost.trainer.policy import Policy
from rlpost.types import Rollout
from tests.objective.test_objective import CORRECTIONS, LOSSES, REDUCERS
from tests.trainer.test_policy import rollouts

# Uneven: with two data ranks one has thrice the other's groups, with four two have none.
OWNER = {0: 0, 1: 0, 2: 1, 3: 0}
EACH_REDUCER = [f"reducer {name}" for name in REDUCERS]
EVERY = [*EACH_REDUCER, *(f"loss {name}" for name in LOSSES), "idle", "everything", "adapters"]
# By (trainer.context_parallel, trainer.replicas) of four ranks.
CASES = {
    (1, 1): EVERY,
    (2, 1): [*EACH_REDUCER, "loss gspo", "everything", "adapters"],
    (4, 1): ["everything"],
    (1, 2): ["reducer function", "everything", "adapters"],
    (2, 2): ["reducer drgrpo", "reducer function", "loss gspo", "everything", "adapters"],
}


def near(policy: Policy, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts as if an engine a little off the trainer had sampled them: corrections cut some and keep others."""
    scored = policy.logprobs(rollouts)
    moved = []
    for index, rollout in enumerate(rollouts):
        place = 3 * rollout.prompt.group_id + rollout.sample_index
        offsets = 0.5 * torch.sin(torch.arange(len(scored[index])) + place)
        completion = replace(rollout.completion, rollout_logprobs=tuple((scored[index] + offsets).tolist()))
        moved.append(replace(rollout, completion=completion))
    return moved


@lru_cache
def loaded(directory: Path) -> nn.Module:
    return trainer_model.load(directory).double()


def update(name: str, context: int, replicas: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and whole gradients of one case."""
    kind, _, which = name.partition(" ")
    directory = TinyLlama(num_heads=4, num_kv_heads=2).directory()
    distributed.split_context(context)
    mesh = distributed.sharding_mesh(replicas)

    def policy_model(path: Path, checkpointing: bool = False) -> trainer_model.PolicyModel:
        language_model = deepcopy(loaded(path))
        if kind == "adapters":
            torch.manual_seed(0)
            add_adapters(language_model, LoRAConfig(rank=4, alpha=8.0))
            for parameter_name, parameter in language_model.named_parameters():
                if "lora_B" in parameter_name:  # at 0, as they start, A would have no gradient
                    nn.init.normal_(parameter, std=0.1)
        trainer = TrainerConfig(activation_checkpointing=checkpointing)
        return trainer_model.shard(language_model, SamplingDistribution(0.7, top_k=50), mesh, trainer)

    loss = LOSSES[which if kind == "loss" else "clipped"]
    reducer = REDUCERS[which if kind == "reducer" else "grpo"]
    # Without the entropy's pull, a rank whose groups have no advantage has no backward pass of its own.
    objective = Objective(loss, reducer) if kind == "idle" else Objective(loss, reducer, CORRECTIONS, entropy_coef=0.01)
    algorithm = AlgorithmConfig()
    reference = None
    if kind == "everything":
        objective = Objective(loss, reducer, kl=KLConfig(coef=0.1), entropy_coef=0.01)
        algorithm = AlgorithmConfig(num_mini_batches=2, top_entropy_share=0.5)
        reference = policy_model(TinyLlama(num_heads=4, num_kv_heads=2, seed=1).directory())
    ours = policy_model(directory, checkpointing=kind == "everything")
    if kind == "adapters":
        objective, reference = Objective(loss, reducer, kl=KLConfig(coef=0.1)), WithoutAdapters(ours)
    optimizer = AdamW(lr=0.0, max_grad_norm=None)(ours.parameters(), 1)
    sizes = {"micro_batch_tokens": 24, "max_completion_tokens": 8}
    policy = Policy(ours, reference, objective, optimizer, algorithm, **sizes, max_logprob_diff=None, seed=0)

    size, here = distributed.world_size() // context, distributed.rank() // context
    share = near(policy, [r for r in rollouts() if OWNER[r.prompt.group_id] % size == here])
    if kind == "idle":
        share = [replace(r, advantage=0.0 if OWNER[r.prompt.group_id] else r.advantage) for r in share]
    metrics = policy.update(share, [0, 1, 2, 3], step=1)
    metrics.pop("train/tokens_per_s")
    if reference is not None:  # of rollouts that each rank has sampled for itself, whatever it trains on
        own = distributed.share_of(rollouts())
        kls = distributed.gather_all(list(zip(map(place, own), policy.sequence_kl(own), strict=True)))
        metrics |= {f"kl of {name}": kl for part in kls for name, kl in part}
    trained = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    return metrics, {n: distributed.full(p.grad).clone() for n, p in trained.items()}


def place(rollout: Rollout) -> tuple[int, int]:
    return rollout.prompt.group_id, rollout.sample_index


def main(out: str, meeting: str | None = None) -> None:
    distributed.init(None if meeting is None else int(meeting))
    cases = CASES if distributed.world_size() == 4 else {(1, 1): EVERY}
    updates = {grid: {name: update(name, *grid) for name in names} for grid, names in cases.items()}
    distributed.split_context(1)
    mine = [r for r in rollouts() if OWNER[r.prompt.group_id] % distributed.world_size() == distributed.rank()]
    dealt = [distributed.gather_all([place(r) for r in share]) for share in (mine, distributed.balanced(mine))]
    neighbours = distributed.RankGroup(2 if distributed.world_size() == 4 else 1)
    sharing = distributed.gather_all((neighbours.index, neighbours.gather(distributed.rank())))
    if distributed.is_main():
        torch.save({"updates": updates, "dealt": dealt, "sharing": sharing}, Path(out))
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
