"""A run's completions as one page that opens from the disk, without a network.

Every prompt with all samples of its group: rewards by function, advantage, length, finish reason, and each token coloured by
its log-probability or by its importance ratio; filters by step, reward, correctness, length, finish reason and text.
"""

import json
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from rlpost.record.completions import num_rows, read_rollouts, saved_steps
from rlpost.types import Rollout

MOST_COMPLETIONS = 2000  # on a page, unless steps are named


def spread_steps(run_dir: Path, saved: Sequence[int]) -> list[int]:
    """Steps evenly over the run, first and last among them, that fit on a page."""
    each = num_rows(run_dir, saved[0])
    count = max(2, MOST_COMPLETIONS // max(each, 1))
    if len(saved) <= count:
        return list(saved)
    return sorted({saved[round(i * (len(saved) - 1) / (count - 1))] for i in range(count)})


def read_groups(
    run_dir: Path, steps: Sequence[int], correct: Callable[[Rollout], bool], to_text: Callable[[int], str] | None
) -> list[dict[str, Any]]:
    """The page's data: an entry for each prompt and its samples.

    Args: to_text: a token's text; None leaves a completion in one piece, without colours.
    """
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    for step in steps:
        for rollout in read_rollouts(run_dir, step):
            prompt = rollout.prompt
            about = {"step": step, "prompt": prompt.text, "answer": prompt.example.answer, "id": prompt.group_id}
            group = groups.setdefault((step, prompt.group_id), {**about, "task": prompt.example.task, "samples": []})
            group["samples"].append(_sample(rollout, to_text) | {"correct": correct(rollout)})
    return list(groups.values())


def _sample(rollout: Rollout, to_text: Callable[[int], str] | None) -> dict[str, Any]:
    completion = rollout.completion
    sample = {
        "i": rollout.sample_index,
        "rewards": {name: _number(value) for name, value in rollout.rewards.items()},
        "errors": "; ".join(f"{name} {reason}" for name, reason in rollout.reward_errors.items()),
        "reward": _number(rollout.reward),
        "advantage": _number(rollout.advantage),
        "kept": rollout.is_trained_on,
        "finish": completion.finish_reason,
        "length": len(completion.token_ids),
        "sampled": completion.sampled_mask,  # of an episode: false for a reply's tokens
    }
    if to_text is None:
        return sample | {"tokens": [completion.text], "logprobs": [], "ratios": []}
    theirs, ours = completion.rollout_logprobs, rollout.trainer_logprobs
    ratios = [] if ours is None else [math.exp(a - b) for a, b in zip(ours.tolist(), theirs, strict=True)]
    return sample | {
        "tokens": [to_text(token) for token in completion.token_ids],
        "logprobs": [round(value, 4) for value in theirs],
        "ratios": [round(value, 4) for value in ratios],
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def page(
    run_dir: Path,
    steps: Sequence[int],
    name: str,
    correct: Callable[[Rollout], bool],
    to_text: Callable[[int], str] | None,
) -> str:
    """The whole HTML page.

    Args:
        name: the run's name.
        correct: whether a completion counts as correct.
        to_text: a token's text; None shows completions in one piece, without colours.
    """
    data = {"groups": read_groups(run_dir, steps, correct, to_text)}
    embedded = json.dumps(data, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
    template = jinja2.Environment(autoescape=True).from_string(
        (files("rlpost.record") / "page.html.j2").read_text(encoding="utf-8")
    )
    saved = saved_steps(run_dir)
    shown = f"{len(steps)} of {len(saved)} steps" if len(steps) < len(saved) else f"{len(saved)} steps"
    return template.render(name=name, run=run_dir.name, shown=shown, data=embedded)
