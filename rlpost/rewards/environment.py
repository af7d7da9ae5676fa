"""The reward that the environment gave over an episode's turns."""

from typing import Any


class EnvironmentReward:
    """The sum of an episode's rewards; None for a completion without an environment."""

    def __call__(self, *, environment_rewards: list[float | None], **_: Any) -> list[float | None]:
        return environment_rewards
