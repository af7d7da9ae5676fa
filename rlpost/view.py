"""rlpost-view: a run's completions as one page that opens from the disk, without a network.

Every prompt with all samples of its group: rewards by function, advantage, length, finish reason, and each token coloured by
its log-probability or by its importance ratio; filters by step, reward, correctness, length, finish reason and text.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import OmegaConf

from rlpost.config import build, reward_nodes
from rlpost.errors import UserError, run_command

MOST_COMPLETIONS = 2000  # on a page, unless steps are named


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(p.stem.removeprefix("step-")) for p in run_dir.glob("completions/step-*.parquet"))


def parse_steps(text: str, saved: Sequence[int]) -> list[int]:
    """ "1,5-10" as those of the saved steps.

    Raises: UserError for another form, or where nothing is saved of them.
    """
    wanted: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdigit() or not last.isdigit():
            raise UserError(f"--steps {text}: expected numbers and ranges, as in 1,5-10")
        wanted |= set(range(int(first), int(last) + 1))
    if not (chosen := [step for step in saved if step in wanted]):
        raise UserError(f"--steps {text}: the run has saved steps {saved[0]}..{saved[-1]}")
    return chosen


def spread_steps(run_dir: Path, saved: Sequence[int]) -> list[int]:
    """Steps evenly over the run, first and last among them, that fit on a page."""
    each = pq.read_metadata(run_dir / "completions" / f"step-{saved[0]:06d}.parquet").num_rows
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
        for row in pq.read_table(run_dir / "completions" / f"step-{step:06d}.parquet").to_pylist():
            key = (step, row["group_id"])
            group = groups.setdefault(
                key,
                {"step": step, "id": row["group_id"], "prompt": row["prompt"], "answer": row["answer"], "samples": []},
            )
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


def page(run_dir: Path, steps: Sequence[int]) -> str:
    """The whole HTML page."""
    import jinja2

    cfg = OmegaConf.load(run_dir / "config.yaml")
    data = {
        "groups": read_groups(run_dir, steps, _token_texts(cfg)),
        "correct": cfg.evaluation.correct_function or next(iter(reward_nodes(cfg))),
        "threshold": cfg.evaluation.correct_threshold,
    }
    embedded = json.dumps(data, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
    template = jinja2.Environment(autoescape=True).from_string(
        (files("rlpost") / "view.html.j2").read_text(encoding="utf-8")
    )
    saved = saved_steps(run_dir)
    shown = f"{len(steps)} of {len(saved)} steps" if len(steps) < len(saved) else f"{len(saved)} steps"
    return template.render(name=cfg.name, run=run_dir.name, shown=shown, data=embedded)


def _token_texts(cfg: Any) -> Callable[[int], str] | None:
    """None, and a word about it, where the run's tokenizer is not to be had any more."""
    from rlpost.models import load_tokenizer

    try:
        source = build(cfg.model)
        tokenizer = load_tokenizer(source.directory(), source.trust_remote_code)
    except (UserError, OSError) as error:
        print(f"rlpost-view: no tokenizer, so no token is coloured: {error}", file=sys.stderr)
        return None
    known: dict[int, str] = {}

    def to_text(token: int) -> str:
        if token not in known:
            known[token] = tokenizer.decode([token])
        return known[token]

    return to_text


def main() -> None:
    run_command("rlpost-view", _main)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="rlpost-view", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", help="as in 1,5-10; default: as many as fit on a page, evenly spread")
    parser.add_argument("--out", type=Path, help="the page; default: RUN_DIR/completions.html")
    arguments = parser.parse_args()
    if not (arguments.run_dir / "config.yaml").is_file():
        raise UserError(f"{arguments.run_dir}: not a run directory (no config.yaml)")
    if not (saved := saved_steps(arguments.run_dir)):
        raise UserError(f"{arguments.run_dir}: it has no saved completions yet")
    steps = parse_steps(arguments.steps, saved) if arguments.steps else spread_steps(arguments.run_dir, saved)
    out = arguments.out or arguments.run_dir / "completions.html"
    out.write_text(page(arguments.run_dir, steps), encoding="utf-8")
    print(f"{out}: {len(steps)} of {len(saved)} steps")
    return 0


if __name__ == "__main__":
    main()
