"""The report's figures: each metric along the steps, a line and a band an arm; and the differences to the baseline."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from rlpost.sweep.arms import Plan
from rlpost.sweep.measures import Summary
from rlpost.sweep.results import JobResult
from rlpost.sweep.statistics import band

# file name -> panels (metric, what it is)
FIGURES: Mapping[str, Sequence[tuple[str, str]]] = {
    "reward": [("reward/mean", "mean reward")],
    "accuracy": [("eval/accuracy", "held-out accuracy")],
    "length_by_correctness": [
        ("completions/length_correct", "tokens of correct completions"),
        ("completions/length_incorrect", "tokens of incorrect completions"),
    ],
    "entropy": [("policy/entropy", "entropy (nats a token)")],
    "kl": [("policy/kl_ref", "KL to the reference (nats a token)")],
    "grad_norm": [("policy/grad_norm", "gradient norm before clipping")],
    "effective_scale": [("objective/pg_scale", "sum of |advantage x weight|, over GRPO's")],
}
LOGARITHMIC = {"policy/grad_norm", "objective/pg_scale"}  # a divisor moves them by orders of magnitude
FEW_POINTS = 10  # a curve of fewer shows them


def draw(results: Sequence[JobResult], plan: Plan, directory: Path) -> dict[str, Path]:
    """Draw every figure that has data. Returns: name -> PNG."""
    drawn = {}
    for name, panels in FIGURES.items():
        known = [(metric, label) for metric, label in panels if any(r.curve(metric) for r in results)]
        if not known:
            continue
        figure, axes = pyplot.subplots(1, len(known), figsize=(6.4 * len(known), 3.8), squeeze=False)
        for panel, (metric, label) in zip(axes[0], known, strict=True):
            _curves(panel, results, plan, metric)
            panel.set_xlabel("step")
            panel.set_title(label, loc="left", fontsize=10)
        axes[0][-1].legend(fontsize=8, frameon=False)
        drawn[name] = _save(figure, directory / f"{name}.png")
    return drawn


def draw_differences(summaries: Sequence[Summary], path: Path) -> Path | None:
    """Each arm's difference to the baseline in one measure, seed by seed, with its interval. None without any."""
    compared = [s.comparison for s in summaries if s.comparison is not None and s.comparison.differences]
    if not compared:
        return None
    figure, panel = pyplot.subplots(figsize=(6.4, 1.0 + 0.45 * len(compared)))
    for y, c in enumerate(reversed(compared)):
        if c.difference.has_interval:
            panel.plot([c.difference.low, c.difference.high], [y, y], color="#4477aa", linewidth=2)
        panel.plot([c.difference.mean], [y], "o", color="#4477aa")
        panel.plot(c.differences, [y + 0.18] * len(c.differences), "|", color="#888888")
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(compared)), [c.arm for c in reversed(compared)])
    panel.set_ylim(-0.6, len(compared) - 0.4)
    panel.set_title(f"{summaries[0].measure.label}: difference to {compared[0].baseline}", loc="left", fontsize=10)
    return _save(figure, path)


def _curves(panel: Axes, results: Sequence[JobResult], plan: Plan, metric: str) -> None:
    seen: list[float] = []
    for color, arm in zip(_colors(len(plan.arms)), plan.arms, strict=True):
        curves = [curve for r in results if r.job.arm == arm and (curve := r.curve(metric))]
        for curve in curves:
            panel.plot(list(curve), list(curve.values()), color=color, linewidth=0.5, alpha=0.5)
        estimates = band(curves)
        steps = list(estimates)
        marker = "o" if len(steps) < FEW_POINTS else None
        panel.plot(steps, [e.mean for e in estimates.values()], color=color, lw=1.8, label=arm, marker=marker, ms=4)
        with_interval = {step: e for step, e in estimates.items() if e.has_interval}
        panel.fill_between(
            list(with_interval),
            [e.low for e in with_interval.values()],
            [e.high for e in with_interval.values()],
            color=color,
            alpha=0.12,
            linewidth=0,
        )
        seen += [value for curve in curves for value in curve.values()]
    _limit(panel, seen, metric in LOGARITHMIC)


def _limit(panel: Axes, seen: Sequence[float], logarithmic: bool) -> None:
    """The axis shows the runs; a band of few seeds may reach far beyond them."""
    positive = [value for value in seen if value > 0]
    if logarithmic and positive:  # the zeros of steps that taught nothing are left out
        panel.set_yscale("log")
        panel.set_ylim(min(positive) / 1.3, max(positive) * 1.3)
        return
    low, high = min(seen), max(seen)
    margin = 0.15 * (high - low) or 0.05 * max(abs(high), math.ulp(1.0))
    panel.set_ylim(low - margin, high + margin)


def _colors(count: int) -> list[tuple[float, ...]]:
    """Black for the first arm, then colours that the colour-blind can tell apart (Tol's bright set), then more."""
    bright = ["#000000", "#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#999999"]
    if count <= len(bright):
        return [to_rgb(c) for c in bright[:count]]
    return [pyplot.get_cmap("turbo")(i / (count - 1))[:3] for i in range(count)]


def _save(figure: Figure, path: Path) -> Path:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
