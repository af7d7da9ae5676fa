"""rlpost-view: a run's completions as one page that opens from the disk, without a network."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlpost.config.build import build, correct_function, correct_function_by_task
from rlpost.config.schema import Config
from rlpost.errors import UserError, run_command
from rlpost.evaluate import Correctness
from rlpost.record.completions import saved_steps
from rlpost.record.page import page, spread_steps
from rlpost.record.rundir import RunDir


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


def _token_texts(settings: Config) -> Callable[[int], str] | None:
    """None, and a word about it, where the run's tokenizer is not to be had any more."""
    from rlpost.models.sources import load_tokenizer

    try:
        source = build(settings.model)
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
    parser = argparse.ArgumentParser(prog="rlpost-view", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", help="as in 1,5-10; default: as many as fit on a page, evenly spread")
    parser.add_argument("--out", type=Path, help="the page; default: RUN_DIR/completions.html")
    arguments = parser.parse_args()
    settings = RunDir(arguments.run_dir).settings()
    if not (saved := saved_steps(arguments.run_dir)):
        raise UserError(f"{arguments.run_dir}: it has no saved completions yet")
    steps = parse_steps(arguments.steps, saved) if arguments.steps else spread_steps(arguments.run_dir, saved)
    out = arguments.out or arguments.run_dir / "completions.html"
    threshold = settings.evaluation.correct_threshold
    correct = Correctness(correct_function(settings), threshold, correct_function_by_task(settings))
    text = page(arguments.run_dir, steps, settings.name, correct, _token_texts(settings))
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(steps)} of {len(saved)} steps")
    return 0


if __name__ == "__main__":
    main()
