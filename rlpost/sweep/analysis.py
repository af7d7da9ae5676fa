"""Everything a report says, worked out from the jobs' files before a word is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.sweep.arms import Plan
from rlpost.sweep.claims import FrozenStep, TokenWeights, freeze, token_weights
from rlpost.sweep.measures import Summary, default_threshold, measures, summarize
from rlpost.sweep.results import JobResult, config_differences, read_results
from rlpost.sweep.statistics import sentence

CONCLUDED = ["reward_end", "accuracy_end", "length_incorrect_end", "length_incorrect_change"]


@dataclass(frozen=True)
class Report:
    """A sweep's results and the conclusions from them."""

    plan: Plan
    results: Sequence[JobResult]
    table: Mapping[str, Sequence[Summary]]  # by measure
    missing: Sequence[str]
    pairing: str
    conclusions: Mapping[str, Sequence[str]]  # by measure
    weights: Sequence[TokenWeights]
    frozen: FrozenStep | None
    differences: Mapping[str, Mapping[str, Any]]

    @property
    def sentences(self) -> list[str]:
        return [line for lines in self.conclusions.values() for line in lines]


def analyse(sweep_dir: Path, plan: Plan) -> Report:
    """Read the jobs and compute everything the report says."""
    results = read_results(sweep_dir, plan)
    threshold = plan.threshold if plan.threshold is not None else default_threshold(results)
    everything = {m.name: summarize(results, plan, m) for m in measures(threshold)}
    table = {name: summaries for name, summaries in everything.items() if any(s.values for s in summaries)}
    conclusions = {name: _sentences(table[name]) for name in CONCLUDED if name in table}
    weights, frozen = _claims(sweep_dir, plan, results)
    return Report(
        plan,
        results,
        table,
        [_missing_line(r) for r in results if r.outcome != "finished"],
        _pairing(results, plan),
        {name: lines for name, lines in conclusions.items() if lines},
        weights,
        frozen,
        config_differences(results),
    )


def _missing_line(r: JobResult) -> str:
    where = f" at step {r.step}" if r.rows else ""
    reason = f": {r.reason}" if r.reason else ""
    return f"{r.job.arm}, seed {r.job.seed}: {r.outcome}{where}{reason}"


def _sentences(summaries: Sequence[Summary]) -> list[str]:
    return [sentence(s.comparison, s.measure.label) for s in summaries if s.comparison is not None]


def _pairing(results: Sequence[JobResult], plan: Plan) -> str:
    """The arms' common ground, checked on their first steps."""
    alike, different = [], []
    for seed in plan.seeds:
        firsts = [r.rows[0] for r in results if r.job.seed == seed and r.rows]
        if len(firsts) > 1:
            same = (
                len({(row["reward/mean"], row["completions/length_mean"], row["tokens/total"]) for row in firsts}) == 1
            )
            (alike if same else different).append(str(seed))
    rule = (
        "With the same seed, arms draw the same prompts in the same order and sample their completions with the same "
        "seeds; differences are taken seed by seed."
    )
    if alike:
        rule += f" The first step's completions were alike in all arms (seeds {', '.join(alike)}), as they must be."
    if different:
        rule += (
            f" The first step's completions differ between arms (seeds {', '.join(different)}): the arms differ in more "
            "than what is learned from a step, so only the seeds are paired."
        )
    return rule


def _claims(sweep_dir: Path, plan: Plan, results: Sequence[JobResult]) -> tuple[list[TokenWeights], FrozenStep | None]:
    """Each arm's reducer on one frozen step: the baseline's first, or another arm's where that is missing."""
    by_arm = {r.job.arm: sweep_dir / r.job.directory for r in reversed(results) if r.config}
    saved = [
        r.job
        for r in sorted(results, key=lambda r: r.job.arm != plan.baseline)
        if (sweep_dir / r.job.directory / "completions" / "step-000001.parquet").is_file()
    ]
    if not saved:
        return [], None
    frozen = freeze(sweep_dir / saved[0].directory, saved[0].arm, saved[0].seed)
    return [token_weights(frozen, by_arm[arm], arm) for arm in plan.arms if arm in by_arm], frozen
