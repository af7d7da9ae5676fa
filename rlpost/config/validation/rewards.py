"""Rules over what stands in a reward function's node beside the function's own settings."""

from typing import cast

from rlpost.config.build import reward_nodes, task_names
from rlpost.config.ranges import OneOf
from rlpost.config.schema import Config
from rlpost.config.validation.settings import check_ranges
from rlpost.errors import UserError


def check(settings: Config) -> None:
    for name, node in reward_nodes(settings).items():
        weight = cast(object, node.weight)  # nodes are not typed
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"reward.{name}.weight={node.weight}: expected a finite number")
        check_ranges(node, f"reward.{name}.")
        if node.tasks is None:
            continue
        tasks = cast(object, node.tasks)
        if not (isinstance(tasks, list) and tasks):
            raise UserError(f"reward.{name}.tasks={node.tasks}: expected a list of the mixture's tasks")
        known = OneOf(*task_names(settings))
        if unknown := sorted(set(node.tasks) - set(known.choices)):
            raise UserError(f"reward.{name}.tasks: {unknown[0]!r}: {known.expected(unknown[0])}")
