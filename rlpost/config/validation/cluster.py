"""Rules over the number of processes, and over what is divided among them."""

from rlpost.config.build import build
from rlpost.config.schema import Config
from rlpost.config.targets import constant_of
from rlpost.errors import UserError


def num_ranks(settings: Config) -> int:
    """The number of processes, as far as it is known before they are started; 1 where the cluster does not say."""
    return getattr(build(settings.cluster), "num_ranks", 1)


def ranks_per_engine(settings: Config) -> tuple[str, int]:
    """The engine's setting for the ranks that share one engine, as it names it in `ranks_per_replica`, and its value."""
    engine = settings.rollout.engine
    name = constant_of(str(engine["_target_"]), "ranks_per_replica", None)
    return f"rollout.engine.{name}", engine[name] if name else 1


def check(settings: Config) -> None:
    ranks = num_ranks(settings)
    trainer, algorithm = settings.trainer, settings.algorithm
    for key, parts in (
        ("trainer.context_parallel", trainer.context_parallel),
        ("trainer.replicas", trainer.replicas),
        ranks_per_engine(settings),
    ):
        if ranks % parts:
            raise UserError(f"{key}={parts} does not divide the cluster's {ranks} processes: start more of them")
    if settings.prompts_per_step % algorithm.num_mini_batches:
        raise UserError(
            f"prompts_per_step={settings.prompts_per_step} does not divide into "
            f"algorithm.num_mini_batches={algorithm.num_mini_batches} equal mini-batches"
        )
    data_ranks = ranks // trainer.context_parallel
    share = data_ranks * algorithm.num_mini_batches
    if settings.prompts_per_step % share:
        raise UserError(
            f"prompts_per_step={settings.prompts_per_step} does not divide over the cluster's {data_ranks} "
            f"{'processes' if data_ranks == ranks else 'context groups'} x "
            f"algorithm.num_mini_batches={algorithm.num_mini_batches}; use a multiple of {share}"
        )
    if trainer.context_parallel > 1 and trainer.layout != "shared_prefix":
        raise UserError(
            f"trainer.context_parallel={trainer.context_parallel} splits rows of trainer.layout=shared_prefix, not "
            f"of {trainer.layout}"
        )
