"""The protocol of environments: an episode for each sample, a reply for each turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlpost.types import Example


@dataclass(frozen=True)
class Reply:
    """The environment's answer to a turn of the model.

    Attributes:
        messages: chat messages the model sees before its next turn; not trained on.
        reward: added to the episode's, which `reward=environment` gives.
        done: the episode is over; the messages are not shown any more.
    """

    messages: Sequence[Mapping[str, str]] = ()
    reward: float = 0.0
    done: bool = False


class Episode(Protocol):
    def step(self, completion: str) -> Reply:
        """Args: completion: the text of the model's turn, end token and stop strings as it wrote them."""
        ...


class Environment(Protocol):
    @property
    def stop(self) -> Sequence[str]: ...  # strings that end a turn, beside the run's own

    # tools: optionally, JSON schemas of what the model may call, for its chat template

    def reset(self, example: Example, seed: int) -> Episode:
        """A fresh episode of an example; its randomness, if any, is a function of the seed."""
        ...
