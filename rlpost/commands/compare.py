"""rlpost-compare: what other reducers and advantages would have done with one saved step."""

import argparse
import csv
import json
from pathlib import Path

from rlpost.config.build import correct_function, correct_function_by_task
from rlpost.data.packing import active_rollouts
from rlpost.errors import run_command
from rlpost.evaluate import Correctness
from rlpost.record.completions import load_rollouts
from rlpost.record.rundir import RunDir
from rlpost.sweep.compare import compare, make_arm, plot, sentences, table

DEFAULT_ARMS = ["grpo/grpo", "drgrpo/grpo", "grpo/drgrpo", "drgrpo/drgrpo", "grpo/token_mean"]


def main() -> None:
    run_command("rlpost-compare", _main)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="rlpost-compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument(
        "--arms", nargs="+", default=DEFAULT_ARMS, help="ALGORITHM/REDUCER[:key=value]; the first is the baseline"
    )
    parser.add_argument("--out", type=Path, help="where compare.csv, .json and .png go; default: RUN_DIR/compare")
    arguments = parser.parse_args()
    made = {spec: make_arm(spec) for spec in arguments.arms}
    settings = RunDir(arguments.run_dir).settings()
    rollouts = load_rollouts(arguments.run_dir, arguments.step)
    threshold = settings.evaluation.correct_threshold
    is_correct = Correctness(correct_function(settings), threshold, correct_function_by_task(settings))
    correct = [is_correct(r) for r in rollouts]
    loss_masks = active_rollouts(rollouts, settings.algorithm.mask_truncated)
    arms = compare(rollouts, made, settings.rollout.max_tokens, correct, loss_masks)

    out = arguments.out or arguments.run_dir / "compare"
    out.mkdir(parents=True, exist_ok=True)
    rows = table(arms)
    with (out / f"step-{arguments.step:06d}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (out / f"step-{arguments.step:06d}.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    plot(arms, rollouts, out / f"step-{arguments.step:06d}.png")

    lengths = [len(r.completion.token_ids) for r in rollouts]
    print(
        f"step {arguments.step}: {len(rollouts)} completions of {min(lengths)}..{max(lengths)} tokens, {sum(correct)} correct\n"
    )
    print(f"{'arm':<28}{'scale':>10}{'norm':>10}{'cosine':>8}   weight on short/middle/long   on correct")
    for arm in arms:
        shares = " / ".join(f"{share:.2f}" for share in arm.by_length.values())
        print(f"{arm.name:<28}{arm.scale:>10.4g}{arm.norm:>10.4g}{arm.cosine:>8.3f}   {shares:<27}   {arm.correct:.2f}")
    print(*["", *sentences(arms)], sep="\n")
    print(f"\n{out}/step-{arguments.step:06d}.csv, .json and .png")
    return 0


if __name__ == "__main__":
    main()
