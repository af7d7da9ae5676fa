"""A sweep's answer as one page, with its table and figures beside it, at any time.

report/report.html opens from the disk without a network; table.csv and curves.csv hold every number in it.
"""

import base64
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from rlpost.sweep import parent_run
from rlpost.sweep.analysis import Report, analyse
from rlpost.sweep.arms import Plan
from rlpost.sweep.figures import FIGURES, draw, draw_differences
from rlpost.sweep.measures import Measure, Summary
from rlpost.sweep.statistics import band, bootstrap_intervals


def write_report(sweep_dir: Path) -> tuple[Path, Report]:
    """Write report/ in the sweep's directory, and put it all into the sweep's MLflow run.

    Returns: report.html, and what it says. Raises: UserError where the directory holds no sweep.
    """
    plan = Plan.read(sweep_dir)
    report = analyse(sweep_dir, plan)
    directory = sweep_dir / "report"
    directory.mkdir(exist_ok=True)
    tables = [_write_table(report, directory / "table.csv"), _write_curves(report, directory / "curves.csv")]
    figures = draw(report.results, plan, directory)
    for name in report.conclusions:
        if path := draw_differences(report.table[name], directory / f"difference_{name}.png"):
            figures[f"difference_{name}"] = path
    page = directory / "report.html"
    children = [r.mlflow_run_id for r in report.results if r.mlflow_run_id]
    links = parent_run.links(plan, children)
    page.write_text(_render(report, figures, links), encoding="utf-8")
    parent_run.publish(plan, _metrics(report), [page, *tables, *figures.values()], children)
    return page, report


TABLE = [
    *("measure", "arm", "n", "mean", "t_low", "t_high", "bootstrap_low", "bootstrap_high", "interquartile_mean"),
    *("difference", "difference_low", "difference_high", "pairs", "effect_size", "p", "p_holm", "p_permutation"),
    "needed_seeds",
]


def _table_rows(table: Mapping[str, Sequence[Summary]]) -> Iterable[list[Any]]:
    for name, summaries in table.items():
        for s in summaries:
            row: list[Any] = [name, s.arm, s.estimate.n, s.estimate.mean, s.estimate.low, s.estimate.high]
            row += [*s.bootstrap, s.iqm]
            if (c := s.comparison) is not None:
                row += [c.difference.mean, c.difference.low, c.difference.high, c.difference.n, c.effect_size]
                row += [c.p_value, c.p_adjusted, c.p_permutation, c.needed_seeds]
            yield row + [None] * (len(TABLE) - len(row))


def _write_table(report: Report, path: Path) -> Path:
    return _write_csv(path, TABLE, _table_rows(report.table))


def _write_curves(report: Report, path: Path) -> Path:
    """Every figure's bands: mean, t and bootstrap interval at each step."""
    rows = []
    for metric, _ in (panel for panels in FIGURES.values() for panel in panels):
        for arm in report.plan.arms:
            curves = [curve for r in report.results if r.job.arm == arm and (curve := r.curve(metric))]
            estimates = band(curves)
            whole = [step for step in estimates if all(step in curve for curve in curves)]
            values = np.array([[curve[step] for step in whole] for curve in curves]).reshape(len(curves), len(whole))
            bootstrap = dict(zip(whole, zip(*bootstrap_intervals(values), strict=True), strict=True))
            for step, e in estimates.items():
                rows.append([metric, arm, step, e.n, e.mean, e.low, e.high, *bootstrap.get(step, (None, None))])
    header = ["metric", "arm", "step", "n", "mean", "t_low", "t_high", "bootstrap_low", "bootstrap_high"]
    return _write_csv(path, header, rows)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """A number that is not known is an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in rows:
            writer.writerow("" if value is None or value != value else value for value in row)
    return path


def _metrics(report: Report) -> dict[str, float]:
    """The table as metrics of the sweep's run: arm/measure and arm/measure_difference."""
    found: dict[str, float] = {}
    for name, summaries in report.table.items():
        for s in summaries:
            arm = "".join(c if c.isalnum() or c in "_-. " else "_" for c in s.arm)
            found[f"{arm}/{name}"] = s.estimate.mean
            if s.comparison is not None:
                found[f"{arm}/{name}_difference"] = s.comparison.difference.mean
    outcomes = [r.outcome for r in report.results]
    counts = {"jobs/finished": outcomes.count("finished"), "jobs/total": len(outcomes)}
    return {name: value for name, value in found.items() if math.isfinite(value)} | counts


def _render(report: Report, figures: Mapping[str, Path], links: Mapping[str, str]) -> str:
    template = (files("rlpost.sweep") / "report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"num": _number, "interval": _interval}
    labels: dict[str, Measure] = {name: summaries[0].measure for name, summaries in report.table.items()}
    return environment.from_string(template).render(
        report=report,
        plan=report.plan,
        labels=labels,
        figures={name: base64.b64encode(path.read_bytes()).decode() for name, path in figures.items()},
        links=links,
        finished=sum(r.outcome == "finished" for r in report.results),
        least_p=2 / 2 ** len(report.plan.seeds),
    )


def _number(value: Any, digits: int = 3) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _interval(low: float, high: float, digits: int = 3) -> str:
    return (
        f"[{_number(low, digits)}, {_number(high, digits)}]"
        if math.isfinite(low) and math.isfinite(high)
        else "no interval"
    )
