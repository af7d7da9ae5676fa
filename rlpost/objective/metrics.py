"""Metrics that know how their parts are put together, whether these are of micro-batches, of ranks or of optimizer steps.

Example: two micro-batches of an optimizer step give `Max(1.2)` and `Max(3.0)`; `joined` makes `Max(3.0)` of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

import numpy as np
from torch import Tensor

Number = float | Tensor  # a tensor of one element, until it is joined to others


@dataclass(frozen=True)
class Sum:
    """Parts add up within an optimizer step; over the optimizer steps of a batch the mean is reported."""

    total: Number

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(_number(self.total) + _number(other.total))

    @property
    def value(self) -> float:
        return _number(self.total)


@dataclass(frozen=True)
class Mean:
    """A weighted mean: totals and weights add up. It is NaN where nothing has a weight."""

    total: Number
    weight: Number = 1.0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(_number(self.total) + _number(other.total), _number(self.weight) + _number(other.weight))

    @property
    def value(self) -> float:
        weight = _number(self.weight)
        return _number(self.total) / weight if weight else float("nan")


@dataclass(frozen=True)
class Max:
    """The largest of all parts; NaN where one of them is."""

    largest: Number

    def __add__(self, other: "Max") -> "Max":
        return Max(float(np.maximum(_number(self.largest), _number(other.largest))))

    @property
    def value(self) -> float:
        return _number(self.largest)


@dataclass(frozen=True)
class Min:
    """The smallest of all parts; NaN where one of them is."""

    smallest: Number

    def __add__(self, other: "Min") -> "Min":
        return Min(float(np.minimum(_number(self.smallest), _number(other.smallest))))

    @property
    def value(self) -> float:
        return _number(self.smallest)


Metric = Sum | Mean | Max | Min


def joined(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One metric of each name from all parts that have it.

    Raises: TypeError if a name is one kind of metric in one part and another in the next.
    """
    whole: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            before = whole.get(name)
            if before is not None and type(before) is not type(metric):
                raise TypeError(
                    f"{name} is a {type(before).__name__} in one part and a {type(metric).__name__} in another"
                )
            whole[name] = _floats(metric) if before is None else before + metric  # pyright: ignore[reportOperatorIssue] - one kind
    return whole


def over_optimizer_steps(steps: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """The values of a batch from the metrics of each of its optimizer steps."""
    averaged = ({n: Mean(m.total) if isinstance(m, Sum) else m for n, m in step.items()} for step in steps)
    return {name: metric.value for name, metric in joined(averaged).items()}


def _floats(metric: Metric) -> Metric:
    return type(metric)(*map(_number, astuple(metric)))


def _number(value: Number) -> float:
    return value.item() if isinstance(value, Tensor) else value
