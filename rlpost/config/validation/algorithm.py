"""Rules over the algorithm's settings together."""

from rlpost.config.schema import Config
from rlpost.config.targets import constant_of
from rlpost.errors import UserError


def check(settings: Config) -> None:
    algorithm, kl, lora = settings.algorithm, settings.algorithm.kl, settings.trainer.lora
    if lora.rank and kl.reference_every:
        raise UserError(
            f"algorithm.kl.reference_every={kl.reference_every}: with trainer.lora.rank={lora.rank} the reference is the "
            "policy without its adapters, which does not move"
        )
    if algorithm.max_attempts > 1 and not algorithm.filter:
        raise UserError(
            f"algorithm.max_attempts={algorithm.max_attempts} has nothing to refill: set "
            "algorithm.filter._target_=rlpost.rollout.filters.VariedRewards"
        )
    if algorithm.multi_reward == "normalize_then_sum":
        changed = "algorithm.reward_processing" if algorithm.reward_processing else None
        if kl.reward_coef > 0:
            changed = "algorithm.kl.place=reward"
        if changed:
            raise UserError(
                f"algorithm.multi_reward=normalize_then_sum leaves no summed reward for {changed} to change"
            )
    is_group_relative = constant_of(str(algorithm.advantage["_target_"]), "is_group_relative", False)
    if settings.samples_per_prompt < 2 and is_group_relative:
        raise UserError(
            "samples_per_prompt=1 gives every completion the advantage 0: a group-relative advantage needs at least 2"
        )
