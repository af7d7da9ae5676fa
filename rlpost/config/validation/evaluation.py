"""Rules over evaluation."""

from rlpost.config.build import reward_nodes
from rlpost.config.ranges import OneOf
from rlpost.config.schema import Config
from rlpost.errors import UserError


def check(settings: Config) -> None:
    e = settings.evaluation
    if any(k < 1 for k in e.pass_at):
        raise UserError(f"evaluation.pass_at={e.pass_at}: every k must be at least 1")
    if max(e.pass_at, default=1) > e.num_samples:
        raise UserError(
            f"evaluation.pass_at={e.pass_at} needs evaluation.num_samples of at least {max(e.pass_at)}, not {e.num_samples}"
        )
    if e.num_samples > 1 and e.temperature == 0:
        raise UserError(
            f"evaluation.num_samples={e.num_samples} with evaluation.temperature=0 would sample the "
            "same completion again; set a temperature over 0"
        )
    names = OneOf(*reward_nodes(settings))
    if e.correct_function is not None and not names.holds(e.correct_function):
        raise UserError(f"evaluation.correct_function={e.correct_function}: {names.expected(e.correct_function)}")
