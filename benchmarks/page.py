"""docs/benchmarks/README.md and its plots, from results.json alone."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import against_trl, plan
from benchmarks.common import spread


def write(results: dict[str, Any], out: Path) -> None:
    """Sections for the benchmarks that have been measured."""
    sections = {
        "against_trl": _against_trl,
        "floor": _floor,
        "memory": _memory,
        "growth": _growth,
        "overhead": _platform,
        "plan": _plan,
    }
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` (`python -m benchmarks`), which writes this page, its plots and results.json. Seconds are "
        "medians, smallest to largest in brackets. What bounds them: [performance.md](../performance.md).",
    ]
    for name, section in sections.items():
        if name in results:
            entry = results[name]
            lines += ["", *section(entry["results"], results, out), "", _conditions(name, entry)]
    (out / "README.md").write_text("\n".join(lines) + "\n")


def _conditions(name: str, entry: dict[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in entry["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in entry["versions"].items())
    made = f"`make bench ARGS='--only {name}'`, {entry['date']}, commit {entry['commit'][:12]}"
    return f"<sub>{made}; {entry['cpu']}, {machine}; {versions}</sub>"


def _against_trl(results: dict[str, Any], _: dict[str, Any], out: Path) -> list[str]:
    figure, panels = plt.subplots(1, len(results), figsize=(10, 3.6), sharey=True)
    for axes, (case, sides) in zip(panels, results.items(), strict=True):
        for place, side in enumerate(sides.values()):
            bottom = 0.0
            phases = ("rollout", "update", "sync") if "rollout" in side else ("seconds",)
            for phase, color in zip(phases, ("#4477aa", "#ee6677", "#228833"), strict=False):
                height = statistics.median(side[phase])
                axes.bar(place, height, bottom=bottom, color="#bbbbbb" if phase == "seconds" else color)
                bottom += height
            axes.text(place, bottom, f"{statistics.median(side['seconds']):.1f} s", ha="center", va="bottom")
        axes.set_xticks(range(len(sides)), [against_trl.LABELS[name] for name in sides])
        axes.set_title(case)
        axes.margins(y=0.12)
    panels[0].set_ylabel("seconds a step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in ("#4477aa", "#ee6677", "#228833", "#bbbbbb")]
    figure.legend(handles, ["rollout", "update", "weight sync", "whole step"], loc="outside lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(out / "against_trl.png", dpi=110)
    plt.close(figure)
    return [
        "## A step against trl",
        "",
        "SmolLM2-135M-Instruct, 8 prompts x 8 samples, at most 32 new tokens, AdamW, two threads; GRPOTrainer with "
        "transformers generation (its vLLM support ends at 0.31, and its first weight sync fails on vLLM for CPUs). "
        "default: the default experiment as it starts, where most groups have no advantage and get no backward pass. "
        "busy: nothing can be left out. trl is run as its users run it, and in the default case once more with the memory "
        "settings that rlpost gives its own workers (huge pages). bfloat16 is measured where the CPU multiplies it.",
        "",
        *against_trl.table(results),
        "",
        "![seconds a step](against_trl.png)",
    ]


def _floor(results: dict[str, Any], _: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## Phases against the floor",
        "",
        "The floor is what the phase's matrix products take by themselves on this machine, measured in the same run. The "
        "case is busy, from the third step on.",
        "",
        "| precision | phase | tokens | GFLOP | floor, s | GFLOP/s of the floor | measured, s | measured / floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for dtype, entry in results.items():
        for phase in ("update", "rollout"):
            floor, gflop = entry["floor"][phase], entry["floor"][f"{phase}_gflop"]
            measured = entry["run"][phase]
            ratio = statistics.median(measured) / floor
            lines.append(
                f"| {dtype} | {phase} | {entry['tokens']} | {gflop:.0f} | {floor:.2f} | {gflop / floor:.0f} | "
                f"{spread(measured)} | {ratio:.2f} |"
            )
        sync = entry["run"]["sync"]
        copied = 2 * 4 * 134.5e6 / 1e9 / entry["floor"]["copy_gb_s"]
        lines.append(
            f"| {dtype} | weight sync | | | {copied:.2f} (a copy at {entry['floor']['copy_gb_s']:.0f} GB/s) | | "
            f"{spread(sync)} | {statistics.median(sync) / copied:.1f} |"
        )
    return lines


def _memory(results: dict[str, Any], _: dict[str, Any], out: Path) -> list[str]:
    first, *_others = (point["peak_rss_gb"] for point in results.values())
    return [
        "## Memory",
        "",
        "Two updates of the default model in float32, micro-batches of at most 2048 packed tokens, as a step's tokens grow. "
        "Gradients accumulate from the second micro-batch on, beside which the later ones' activations stand; from then on "
        "what grows is what the allocator does not reuse.",
        "",
        "| packed tokens a step | peak RSS, GB | over the first |",
        "| --- | --- | --- |",
        *(
            f"| {point['positions']} | {point['peak_rss_gb']:.2f} | {point['peak_rss_gb'] / first - 1:.1%} |"
            for point in results.values()
        ),
    ]


def _growth(results: dict[str, Any], _: dict[str, Any], out: Path) -> list[str]:
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4))
    lines = [
        "## Growth",
        "",
        "Updates in float32 of a model of the default one's width with 3 of its 30 layers, micro-batches of at most 2048 "
        "packed tokens.",
    ]
    for axes, (name, points) in zip(panels, results.items(), strict=True):
        values = [int(value) for value in points]
        shown = [p["tokens"] / p["seconds"] for p in points.values()]
        axes.plot(values, shown, "o-", color="#4477aa")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.2 * max(shown))
        axes.set_xlabel(name)
        axes.set_ylabel("completion tokens/s")
        lines += [
            "",
            f"| {name} | packed tokens | completion tokens | seconds | completion tokens/s | peak RSS, GB |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for value, p in points.items():
            rate = p["tokens"] / p["seconds"]
            lines.append(
                f"| {value} | {p['positions']} | {p['tokens']} | {p['seconds']:.2f} | {rate:.0f} | {p['peak_rss_gb']:.2f} |"
            )
    figure.tight_layout()
    figure.savefig(out / "growth.png", dpi=110)
    plt.close(figure)
    return [*lines, "", "![growth](growth.png)"]


def _platform(results: dict[str, Any], everything: dict[str, Any], out: Path) -> list[str]:
    own = [
        sum(pair) for pair in zip(*(results["overhead"][k] for k in ("inside the step", "between steps")), strict=True)
    ]
    share = ""
    if "against_trl" in everything:
        step = statistics.median(everything["against_trl"]["results"]["default"]["float32"]["seconds"])
        share = f" ({statistics.median(own) / step:.2%} of a default step)"
    return [
        "## The platform itself",
        "",
        "| what | measured |",
        "| --- | --- |",
        f"| from the command to the first step, MLflow on, s | {spread(results['start_up'], 1)} |",
        "| a step's drawing, scoring, advantages, metrics, records and MLflow (8 x 8 samples, tiny model), ms | "
        f"{spread([1000 * value for value in own], 1)}{share} |",
    ]


def _plan(results: dict[str, Any], everything: dict[str, Any], out: Path) -> list[str]:
    lines = [
        "## The cost model",
        "",
        "What `rlpost-plan` counts ([scaling.md](../scaling.md)) against the default model's real objects: 8 prompts of 40 "
        "tokens x 8 completions of 26, one process, float32.",
        "",
        "| count | predicted | real | predicted / real |",
        "| --- | --- | --- | --- |",
        *(f"| {name} | {told:.5g} | {real:.5g} | {told / real:.4f} |" for name, (told, real) in results.items()),
    ]
    if "floor" in everything:
        lines += [
            "",
            "Seconds of the busy case above, predicted from its floor's rates; both leave out what is not a product or a copy.",
            "",
            "| phase | predicted / measured |",
            "| --- | --- |",
            *(
                f"| {name} | {told / real:.2f} |"
                for name, (told, real) in plan.seconds(everything["floor"]["results"]).items()
            ),
        ]
    return lines
