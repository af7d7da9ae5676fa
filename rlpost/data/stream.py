"""The prompt stream: which prompts a step trains on, a function of seed and position alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlpost.types import Prompt


class PromptStream:
    """Endless passes over the prompts, each in a fresh order drawn from (seed, pass).

    Every prompt drawn gets a group id of its own, so the same prompt drawn twice makes two groups.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._position = 0  # prompts drawn so far
        self._order: tuple[int, np.ndarray] | None = None  # (pass, its order)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        drawn = range(self._position, self._position + count)
        self._position = drawn.stop
        return [replace(self._prompts[self._index(position)], group_id=position) for position in drawn]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._prompts))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)))
        return int(self._order[1][offset])
