"""Run under torchrun: gradients of every reducer in float64, the rollouts spread over the ranks; rank 0 saves them.

torchrun --nproc-per-node=N -m tests.trainer.ranks_script OUT
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from rlpost.objective.logprobs import SamplingDistribution
from rlpost.objective.objective import Objective
from rlpost.tiny import TinyLlama
from rlpost.trainer import distributed
from rlpost.trainer import model as trainer_model
from rlpost.trainer.policy import Policy, UpdateSettings, make_optimizer, make_scheduler
from rlpost.types import Rollout
from tests.objective.test_objective import CORRECTIONS, LOSSES, REDUCERS
from tests.trainer.test_policy import rollouts

# Uneven: with two ranks one has twice the tokens, and with a small budget more micro-batches.
OWNER = {0: 0, 1: 0, 2: 1, 3: 0}


def near(policy: Policy, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts as if an engine a little off the trainer had sampled them: corrections cut some and keep others."""
    scored, _ = policy._score(policy.scorer, rollouts)
    moved = []
    for index, rollout in enumerate(rollouts):
        place = 3 * rollout.prompt.group_id + rollout.sample_index
        offsets = 0.5 * torch.sin(torch.arange(len(scored[index])) + place)
        completion = replace(rollout.completion, rollout_logprobs=tuple((scored[index] + offsets).tolist()))
        moved.append(replace(rollout, completion=completion))
    return moved


def main(out: str) -> None:
    distributed.init()
    everyones = rollouts()
    mine = [r for r in everyones if OWNER[r.prompt.group_id] % distributed.world_size() == distributed.rank()]
    results = {}
    cases = [
        *((f"reducer {n}", LOSSES["clipped"], r) for n, r in REDUCERS.items()),
        *((f"loss {n}", value, REDUCERS["grpo"]) for n, value in LOSSES.items()),
        ("idle", LOSSES["clipped"], REDUCERS["grpo"]),
    ]
    for name, loss, reducer in cases:
        language_model = trainer_model.load(TinyLlama().directory()).double()
        scorer = trainer_model.shard(language_model, SamplingDistribution(0.7, top_k=50), distributed.data_mesh())
        optimizer = make_optimizer(scorer, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        settings = UpdateSettings(max_completion_tokens=8, micro_batch_tokens=24, max_grad_norm=None)
        # Without the entropy's pull, a rank whose groups have no advantage has no backward pass of its own.
        objective = (
            Objective(loss, reducer) if name == "idle" else Objective(loss, reducer, CORRECTIONS, entropy_coef=0.01)
        )
        policy = Policy(scorer, None, objective, optimizer, make_scheduler(optimizer, "constant", 0, 1), settings)
        share = near(policy, mine)
        if name == "idle":
            share = [replace(r, advantage=0.0 if OWNER[r.prompt.group_id] else r.advantage) for r in share]
        metrics = policy.update(share, [0, 1, 2, 3], step=1)
        metrics.pop("train/tokens_per_s")
        gradients = {n: distributed.full(p.grad).clone() for n, p in scorer.named_parameters()}
        results[name] = (metrics, gradients)
    before = distributed.gather_all([(r.prompt.group_id, r.sample_index) for r in mine])
    after = distributed.gather_all([(r.prompt.group_id, r.sample_index) for r in distributed.balanced(mine)])
    if distributed.is_main():
        torch.save({"updates": results, "dealt": (before, after)}, Path(out))
    distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
