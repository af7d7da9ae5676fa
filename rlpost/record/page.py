"""A run's completions as one page that opens from the disk, without a network.

Every prompt with all samples of its group: rewards by function, advantage, length, finish reason, and each token coloured by
its log-probability or by its importance ratio; filters by step, reward, correctness, length, finish reason and text.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from rlpost.record.completions import num_rows, read_rows, saved_steps

MOST_COMPLETIONS = 2000  # on a page, unless steps are named


def spread_steps(run_dir: Path, saved: Sequence[int]) -> list[int]:
    """Steps evenly over the run, first and last among them, that fit on a page."""
    each = num_rows(run_dir, saved[0])
    count = max(2, MOST_COMPLETIONS // max(each, 1))
    if len(saved) <= count:
        return list(saved)
    return sorted({saved[round(i * (len(saved) - 1) / (count - 1))] for i in range(count)})


def read_groups(run_dir: Path, steps: Sequence[int], to_text: Callable[[int], str] | None) -> list[dict[str, Any]]:
    """What the page shows: a prompt and its samples an entry.

    Args: to_text: a token's text; None leaves a completion in one piece, without colours.
    """
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    for step in steps:
        for row in read_rows(run_dir, step):
            key = (step, row["group_id"])
            about = {name: row[name] for name in ("step", "prompt", "answer")}
            about |= {"id": row["group_id"], "task": row.get("task", ""), "samples": []}
            group = groups.setdefault(key, about)
            group["samples"].append(_sample(row, to_text))
    return list(groups.values())


def _sample(row: dict[str, Any], to_text: Callable[[int], str] | None) -> dict[str, Any]:
    sample = {
        "i": row["sample_index"],
        "rewards": {n.removeprefix("reward/"): _number(v) for n, v in row.items() if n.startswith("reward/")},
        "errors": row.get("reward_errors") or "",
        "reward": _number(row["reward"]),
        "advantage": _number(row["advantage"]),
        "kept": row["kept"],
        "finish": row["finish_reason"],
        "length": row["num_tokens"],
        "sampled": row.get("sampled"),  # of an episode: false for a reply's tokens
    }
    if to_text is None:
        return sample | {"tokens": [row["completion"]], "logprobs": [], "ratios": []}
    trained = row.get("trainer_logprobs") or []
    ratios = (
        [math.exp(ours - theirs) for ours, theirs in zip(trained, row["rollout_logprobs"], strict=True)]
        if trained
        else []
    )
    return sample | {
        "tokens": [to_text(token) for token in row["token_ids"]],
        "logprobs": [round(value, 4) for value in row["rollout_logprobs"]],
        "ratios": [round(value, 4) for value in ratios],
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def page(
    run_dir: Path,
    steps: Sequence[int],
    name: str,
    correct: str,
    correct_by_task: Mapping[str, str],
    threshold: float,
    to_text: Callable[[int], str] | None,
) -> str:
    """The whole HTML page.

    Args:
        name: the run's.
        correct, correct_by_task, threshold: a completion counts as correct if this reward function, or that of its task,
            gives it at least so much.
        to_text: a token's text; None shows completions in one piece, without colours.
    """
    groups = read_groups(run_dir, steps, to_text)
    for group in groups:
        function = correct_by_task.get(group["task"], correct)
        for sample in group["samples"]:
            reward = sample["rewards"].get(function)
            sample["correct"] = reward is not None and reward >= threshold
    data = {"groups": groups}
    embedded = json.dumps(data, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
    template = jinja2.Environment(autoescape=True).from_string(
        (files("rlpost.record") / "page.html.j2").read_text(encoding="utf-8")
    )
    saved = saved_steps(run_dir)
    shown = f"{len(steps)} of {len(saved)} steps" if len(steps) < len(saved) else f"{len(saved)} steps"
    return template.render(name=name, run=run_dir.name, shown=shown, data=embedded)
