"""Other reducers and advantages on one saved step: the gradients they would have given.

The policy gradient at ratio 1 is the sum over tokens of c_t * grad logprob_t with c_t = advantage * weight. So the vector
of c_t says everything a reducer and an advantage decide: where the weight goes, how large the gradient is, and how it is
turned against another one's. It needs no model: only the step's completions, which every run keeps.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from rlpost.config.build import build, conf_dir
from rlpost.config.nodes import as_dict
from rlpost.config.targets import check_target
from rlpost.data.packing import pack, step_totals
from rlpost.errors import UserError, nearest
from rlpost.types import PackedBatch, Rollout, StepTotals


@dataclass(frozen=True)
class Arm:
    """One advantage with one reducer, and what it makes of the step. The first arm is what the others are held against."""

    name: str
    coefficients: Tensor  # [T] float64: advantage * weight
    scale: float  # sum of |c| over the first arm's
    norm: float  # 2-norm of c over the first arm's
    cosine: float  # between c and the first arm's
    by_length: dict[str, float]  # share of |c| on the shortest, middle and longest third of the completions
    correct: float  # share of |c| on completions counted as correct


def compare(
    rollouts: Sequence[Rollout],
    arms: Mapping[str, tuple[Any, Any]],
    max_completion_tokens: int,
    correct: Sequence[bool],
    loss_masks: Sequence[bool] | None = None,
) -> list[Arm]:
    """Each arm's weights of the rollouts.

    Args:
        arms: name -> (advantage, reducer).
        correct: one a rollout.
        loss_masks: one a rollout, False for those that the run gave no gradient; None: all have one.
    """
    rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
    group_ids = torch.tensor([r.prompt.group_id for r in rollouts])
    masks = [True] * len(rollouts) if loss_masks is None else list(loss_masks)
    totals = step_totals(rollouts, masks, max_completion_tokens)
    (batch,) = pack(rollouts, masks, sys.maxsize, "padded")
    rollout_of_token = torch.tensor(list(batch.rollout_ids))[batch.sequence_index]
    thirds = _length_thirds(rollouts)
    result: list[Arm] = []
    for name, (advantage, reducer) in arms.items():
        c = _coefficients(batch, advantage(rewards, group_ids)[rollout_of_token], reducer, totals)
        first = result[0].coefficients if result else c
        size = c.abs()
        whole = size.sum().item()

        def share(chosen: Tensor, size: Tensor = size, whole: float = whole) -> float:
            return size[chosen[rollout_of_token]].sum().item() / whole if whole else math.nan

        result.append(
            Arm(
                name,
                c,
                scale=_ratio(whole, first.abs().sum().item()),
                norm=_ratio(c.norm().item(), first.norm().item()),
                cosine=_ratio((c @ first).item(), c.norm().item() * first.norm().item()),
                by_length={third: share(chosen) for third, chosen in thirds.items()},
                correct=share(torch.tensor(correct)),
            )
        )
    return result


def _coefficients(batch: PackedBatch, advantages: Tensor, reducer: Any, totals: StepTotals) -> Tensor:
    return advantages * reducer(batch.tokens, totals)


def _length_thirds(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(r.completion.token_ids) for r in rollouts])
    rank = torch.empty_like(lengths)
    rank[lengths.argsort(stable=True)] = torch.arange(len(lengths))
    third = rank * 3 // len(lengths)
    return {name: third == i for i, name in enumerate(("short", "middle", "long"))}


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def make_arm(spec: str) -> tuple[Any, Any]:
    """(advantage, reducer) of "ALGORITHM/REDUCER", each a choice of its group, the reducer with settings after colons:
    "grpo/drgrpo:divisor=64".

    Raises: UserError naming the part that is wrong.
    """
    algorithm, separator, rest = spec.partition("/")
    if not separator:
        raise UserError(f"arm {spec}: expected ALGORITHM/REDUCER, as in grpo/drgrpo:divisor=64")
    reducer, *settings = rest.split(":")
    advantage_node = _choice("algorithm", algorithm)["advantage"]
    if "_target_" not in advantage_node:
        advantage_node = {**_choice("algorithm", "grpo")["advantage"], **advantage_node}
    reducer_node = {**_choice("reducer", reducer), **as_dict(OmegaConf.from_dotlist(settings))}
    check_target(reducer_node, f"reducer {reducer}")
    return build(advantage_node), build(reducer_node)


def _choice(group: str, name: str) -> dict[str, Any]:
    files = {file.stem: file for file in (conf_dir() / group).glob("*.yaml")}
    if name not in files:
        raise UserError(f"{group}={name}: there is no such choice{nearest(name, files)}")
    return as_dict(OmegaConf.load(files[name]), resolve=False)


def table(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm.name,
            "scale": arm.scale,
            "norm": arm.norm,
            "cosine": arm.cosine,
            **{f"weight_{third}": share for third, share in arm.by_length.items()},
            "weight_correct": arm.correct,
        }
        for arm in arms
    ]


def sentences(arms: Sequence[Arm]) -> list[str]:
    """Sentences on an arm's scale beside its direction; none for arms within 5% of the first."""
    first, *others = arms
    return [
        f"{arm.name} has {arm.scale:.3g} times the policy gradient of {first.name}: like a learning rate times {arm.scale:.3g} "
        f"under SGD or where clipping does not bind (AdamW alone undoes it), and a KL term counts {1 / arm.scale:.3g} times as "
        f"much beside it; algorithm.kl.coef times {arm.scale:.3g} would keep the balance."
        for arm in others
        if arm.scale and math.isfinite(arm.scale) and not math.isclose(arm.scale, 1, rel_tol=0.05)
    ]


def plot(arms: Sequence[Arm], rollouts: Sequence[Rollout], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    (batch,) = pack(rollouts, [True] * len(rollouts), sys.maxsize, "padded")
    ids = torch.tensor(list(batch.rollout_ids))[batch.sequence_index]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for arm in arms:
        per_completion = torch.zeros(len(rollouts), dtype=torch.float64).index_add(0, ids, arm.coefficients.abs())
        order = sorted(range(len(rollouts)), key=lambda i: lengths[i])
        cumulative = per_completion[order].cumsum(0) / per_completion.sum().clamp(min=1e-300)
        left.step([lengths[i] for i in order], cumulative.tolist(), where="post", label=arm.name)
    left.set(
        xlabel="completion length [tokens]",
        ylabel="share of the step's weight",
        title="Weight on completions up to a length",
        ylim=(0, 1.02),
    )
    left.legend(fontsize=8)
    names = [arm.name for arm in arms]
    right.barh(names, [arm.scale for arm in arms], color="tab:blue")
    right.set(
        xscale="log",
        xlabel=f"policy gradient relative to {names[0]} (log scale)",
        title="Scale, and cosine to the first",
    )
    right.invert_yaxis()
    for y, arm in enumerate(arms):
        right.annotate(f" cos {arm.cosine:.3f}", (arm.scale, y), va="center", fontsize=8)
    right.margins(x=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)
