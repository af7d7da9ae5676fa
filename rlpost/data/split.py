"""Training and held-out examples, and that no held-out prompt is trained on."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlpost.errors import UserError
from rlpost.types import Example


class TaskData(NamedTuple):
    train: list[Example]
    held_out: list[Example]
    weights: Mapping[str, float] = {}  # shares of a mixture's tasks in training; empty: one pool


def user_message(text: str) -> tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},)


def disjoint(train: Iterable[Example], held_out: Sequence[Example]) -> TaskData:
    """Drop from `train` every example whose messages and images a held-out example has too."""
    reserved = {_asked(example) for example in held_out}
    return TaskData([example for example in train if _asked(example) not in reserved], list(held_out))


def split(examples: Sequence[Example], num_held_out: int, seed: int) -> TaskData:
    """Hold out `num_held_out` distinct prompts, drawn by `seed`; the order of the rest is kept."""
    first_of: dict[tuple[str, tuple[str | bytes, ...]], int] = {}
    for index, example in enumerate(examples):
        first_of.setdefault(_asked(example), index)
    if num_held_out >= len(first_of):
        raise UserError(
            f"task.held_out={num_held_out} leaves no prompt to train on: the task has {len(first_of)} distinct "
            "prompts; hold out fewer"
        )
    chosen = random.Random(seed).sample(sorted(first_of.values()), num_held_out)
    return disjoint(examples, [examples[index] for index in sorted(chosen)])


def _asked(example: Example) -> tuple[str, tuple[str | bytes, ...]]:
    return json.dumps(example.messages), example.images
