"""The prompt stream: which prompts a step trains on, a function of seed and position alone."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlpost.errors import UserError
from rlpost.types import Example, Prompt


class PromptStream:
    """Endless passes over the prompts, each in a fresh order drawn from (seed, pass).

    Every prompt drawn gets a group id of its own, so the same prompt drawn twice makes two groups.

    Args:
        weights: shares by task, of a mixture: at every position the task that is furthest behind its share comes next, and
            passes are a task's own. Empty: one pool.
        curriculum: a column of the examples; the first pass takes prompts as it rises, those with the same value shuffled.

    Raises: UserError if a prompt lacks the curriculum's column.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        weights: Mapping[str, float] | None = None,
        curriculum: str | None = None,
    ) -> None:
        pools: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            pools.setdefault(prompt.example.task if weights else "", []).append(prompt)
        self._pools = {
            name: _Pool(pool, [seed, zlib.crc32(name.encode())] if weights else [seed], curriculum)
            for name, pool in pools.items()
        }
        whole = sum(weights[name] for name in pools) if weights else 1.0
        self._shares = {name: weights[name] / whole if weights else 1.0 for name in pools}
        self._drawn = dict.fromkeys(pools, 0)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": dict(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = dict(state["drawn"])

    def _next(self) -> Prompt:
        position = sum(self._drawn.values())
        name = max(self._shares, key=lambda name: self._shares[name] * (position + 1) - self._drawn[name])
        prompt = self._pools[name].at(self._drawn[name])
        self._drawn[name] += 1
        return replace(prompt, group_id=position)


class _Pool:
    """Prompts of one task, pass after pass."""

    def __init__(self, prompts: Sequence[Prompt], seed: list[int], curriculum: str | None) -> None:
        self._prompts = prompts
        self._seed = seed
        self._ranks = (
            None if curriculum is None else np.array(rising([prompt.example for prompt in prompts], curriculum))
        )
        self._order: tuple[int, np.ndarray] | None = None  # (pass, its order)

    def at(self, position: int) -> Prompt:
        number, offset = divmod(position, len(self._prompts))
        if self._order is None or self._order[0] != number:
            order = np.random.default_rng([*self._seed, number]).permutation(len(self._prompts))
            if number == 0 and self._ranks is not None:
                order = order[np.argsort(self._ranks[order], kind="stable")]
            self._order = (number, order)
        return self._prompts[int(self._order[1][offset])]


def rising(examples: Sequence[Example], column: str) -> list[int]:
    """The rank of each example's value among all values.

    Raises: UserError if an example has none, or they cannot be ordered.
    """
    values: list[Any] = [example.columns.get(column) for example in examples]
    for value, example in zip(values, examples, strict=True):
        if value is None:
            have = ", ".join(example.columns) or "none"
            raise UserError(f"stream.curriculum={column}: a prompt of the task has no such column; it has {have}")
    try:
        known = {value: rank for rank, value in enumerate(sorted(set(values)))}
    except TypeError:
        raise UserError(
            f"stream.curriculum={column}: its values cannot be ordered; expected all numbers or all texts"
        ) from None
    return [known[value] for value in values]
