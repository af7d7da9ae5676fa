"""(a), (c): a whole step against trl 1.16's GRPOTrainer: same model, prompts, sizes, rewards and threads.

Two cases. "default" is the default experiment as it starts: most answers are wrong, so most groups have no advantage.
"busy" asks for long stories and rewards a coin in the text: every completion has 32 tokens and nearly every group has
an advantage, so nothing can be left out.
"""

import json
import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.common import NO_CHECKPOINTS, module, rlpost, run, spread
from rlpost.cluster.node import MALLOC
from rlpost.data.tasks import Addition
from rlpost.objective.matmul import has_bfloat16

# 1 where the answer's last letter is in the alphabet's first half: 0 or 1 by chance, the same on both sides.
COIN = r"[a-mA-M][^a-zA-Z]*$"
BF16 = [
    "trainer.precision=bfloat16",
    "rollout.max_logprob_diff=null",
    "+algorithm.corrections.tis._target_=rlpost.objective.corrections.ImportanceSampling",
]
ANIMALS = ["a fox", "an owl", "a whale", "a goat", "a wolf", "a crow", "a bear", "a mole", "a swan", "a toad"]

# trl is run as its users run it, and once more with the memory settings that rlpost gives its own workers.
LABELS = {
    "trl": "trl 1.16\nfloat32",
    "trl_huge_pages": "trl 1.16\nhuge pages",
    "float32": "rlpost\nfloat32",
    "bfloat16": "rlpost\nbfloat16",
}


def prompts(case: str, into: Path) -> Path:
    """A JSON-lines file of questions with answers."""
    if case == "default":
        examples = Addition(low=1, high=50, held_out=64).load().train
        rows = [{"question": e.messages[-1]["content"], "answer": e.answer} for e in examples]
    else:
        pairs = [(a, b) for a in ANIMALS for b in ANIMALS if a != b]
        rows = [{"question": f"Tell a long story about {a} who meets {b}.", "answer": ""} for a, b in pairs]
    random.Random(0).shuffle(rows)
    into.write_text("".join(json.dumps(row) + "\n" for row in rows[:90]))
    return into


def ours(case: str, steps: int, file: Path, scratch: Path, *overrides: str) -> dict[str, Any]:
    reward = ["reward=[number]"] if case == "default" else ["reward=[format]", f"reward.format.pattern='{COIN}'"]
    run_dir = scratch / f"run-{len(list(scratch.iterdir()))}"
    chosen = ["task=jsonl", f"task.path={file}", "task.held_out=8", *reward, *overrides]
    rows, finished = rlpost(run_dir, *chosen, f"steps={steps}", "tracking=none", *NO_CHECKPOINTS)
    names = {
        "seconds": "time/step",
        "rollout": "time/rollout",
        "update": "time/update",
        "sync": "time/sync",
        "lengths": "completions/length_mean",
        "rewards": "reward/mean",
        "logprob_diff": "rollout/logprob_diff_max",
    }
    result: dict[str, Any] = {key: [row[name] for row in rows] for key, name in names.items()}
    result["idle_groups"] = [row["reward/zero_std_groups"] for row in rows]
    result["peak_rss_gb"] = finished.peak_rss_gb
    # Each group's prompt counts once: the engine and the packed row compute it once.
    tables = [pq.read_table(path).to_pylist() for path in sorted((run_dir / "completions").glob("*.parquet"))]
    result["prompt_tokens"] = [
        sum({row["group_id"]: len(row["prompt_token_ids"]) for row in rows}.values()) for rows in tables
    ]
    return _warm(result, 2)


def _warm(result: dict[str, Any], steps: int) -> dict[str, Any]:
    """Without the first steps, in which memory is taken and libraries choose their kernels."""
    return {key: value[steps:] if isinstance(value, list) else value for key, value in result.items()}


def theirs(case: str, steps: int, file: Path, **environment: str) -> dict[str, Any]:
    finished = run(module("benchmarks.peer", case, steps, file), PYTHONWARNINGS="ignore", **environment)
    (line,) = [line for line in finished.output.splitlines() if line.startswith("RESULT ")]
    return _warm({**json.loads(line.removeprefix("RESULT ")), "peak_rss_gb": finished.peak_rss_gb}, 1)


def measure(repeats: int = 3) -> dict[str, Any]:
    """One side after the other, `repeats` times. bfloat16 only where the CPU has it."""
    results: dict[str, Any] = {}
    for case in ("default", "busy"):
        sides: dict[str, list[dict[str, Any]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            file = prompts(case, scratch / "prompts.jsonl")
            for number in range(repeats):
                print(f"against trl, {case}: repeat {number + 1} of {repeats}", flush=True)
                sides["float32"].append(ours(case, 5, file, scratch))
                sides["trl"].append(theirs(case, 3, file))
                if case == "default":
                    sides["trl_huge_pages"].append(theirs(case, 3, file, GLIBC_TUNABLES=MALLOC))
                if has_bfloat16():
                    sides["bfloat16"].append(ours(case, 5, file, scratch, *BF16))
        results[case] = {name: _summary(runs) for name, runs in sides.items()}
        for name in [name for name in ("float32", "bfloat16") if name in sides]:
            pairs = zip(sides["trl"], sides[name], strict=True)
            results[case][name]["times_faster"] = [_step(peer) / _step(own) for peer, own in pairs]
            own, peer = results[case][name]["peak_rss_gb"], results[case]["trl"]["peak_rss_gb"]
            results[case][name]["memory_ratio"] = max(own) / min(peer)
    return results


def _step(result: dict[str, Any]) -> float:
    return statistics.median(result["seconds"])


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists over all warm steps of all runs; peak memory a run."""
    keys = [key for key, value in runs[0].items() if isinstance(value, list)]
    summary = {key: [value for result in runs for value in result[key]] for key in keys}
    return {**summary, "peak_rss_gb": [result["peak_rss_gb"] for result in runs]}


def table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| case | side | step, s | times faster than trl | tokens a completion | groups without advantage | peak RSS, GB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, sides in results.items():
        for name, side in sides.items():
            label = LABELS[name].replace("\n", ", ")
            faster = spread(side["times_faster"]) if "times_faster" in side else ""
            idle = statistics.mean(side["idle_groups"])
            lines.append(
                f"| {case} | {label} | {spread(side['seconds'])} | {faster} | "
                f"{statistics.mean(side['lengths']):.1f} | {idle:.0%} | {spread(side['peak_rss_gb'], 1)} |"
            )
    return lines
