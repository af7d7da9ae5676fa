"""Metrics of a step over ranks."""

from collections.abc import Mapping

from rlpost.distributed.collectives import max_over_ranks, sum_over_data
from rlpost.objective.metrics import Max, Mean, Metric, Min, Sum


def over_ranks(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Every metric over all ranks' parts of it; every rank gives the same names.

    The ranks of a context group all hold the same sums, which count once.
    """
    parts: dict[str, float] = {}
    largest: dict[str, float] = {}
    for name, metric in metrics.items():
        match metric:
            case Sum(total):
                parts[name] = float(total)
            case Mean(total, weight):
                parts[name], parts[f"{name}/weight"] = float(total), float(weight)
            case Max(value):
                largest[name] = float(value)
            case Min(value):
                largest[name] = -float(value)
    parts, largest = sum_over_data(parts), max_over_ranks(largest)
    reduced: dict[str, Metric] = {}
    for name, metric in metrics.items():
        match metric:
            case Sum():
                reduced[name] = Sum(parts[name])
            case Mean():
                reduced[name] = Mean(parts[name], parts[f"{name}/weight"])
            case Max():
                reduced[name] = Max(largest[name])
            case Min():
                reduced[name] = Min(-largest[name])
    return reduced
