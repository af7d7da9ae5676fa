"""Several tasks in one run, each with its share, its rewards and its evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

from rlpost.data.split import TaskData
from rlpost.data.tasks import Task
from rlpost.errors import UserError
from rlpost.types import Example


@dataclass(frozen=True)
class Mixture:
    """Tasks by name; a reward with `tasks: [name]` applies to theirs alone.

    Attributes:
        tasks: the tasks by name.
        weights: each task's share of the prompts, in any unit; those left out have 1. Empty: every prompt is drawn once a
            pass, whatever its task.
        name: the mixture's name.

    Raises: UserError if a weight is not over 0, or of no task.
    """

    tasks: Mapping[str, Task]
    weights: Mapping[str, float] = field(default_factory=dict)
    name: str = "mixture"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("task.tasks is empty: a mixture needs a task by name, as in +task@task.tasks.sums=addition")
        for name, weight in self.weights.items():
            if name not in self.tasks:
                raise UserError(f"task.weights.{name}: the mixture has no such task; it has {', '.join(self.tasks)}")
            if not weight > 0:
                raise UserError(f"task.weights.{name}={weight}: expected a number over 0; leave the task out instead")

    def load(self) -> TaskData:
        loaded = {name: task.load() for name, task in self.tasks.items()}
        train = [named(example, name) for name, data in loaded.items() for example in data.train]
        # In turn, so that evaluation.max_prompts takes from all of them.
        in_turn = zip_longest(*([named(e, name) for e in data.held_out] for name, data in loaded.items()))
        held_out = [example for example in chain.from_iterable(in_turn) if example is not None]
        weights = {name: float(self.weights.get(name, 1.0)) for name in self.tasks} if self.weights else {}
        return TaskData(train, held_out, weights)


def named(example: Example, task: str) -> Example:
    """The example with a task's name, unless it has one."""
    return example if example.task else replace(example, task=task)
