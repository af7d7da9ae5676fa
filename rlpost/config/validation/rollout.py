"""Rules over sampling: what the engine can do, and what fits the model."""

from rlpost.config.build import build
from rlpost.config.schema import Config
from rlpost.config.targets import constant_of
from rlpost.errors import UserError


def check(settings: Config) -> None:
    rollout = settings.rollout
    bound = rollout.max_logprob_diff
    if settings.trainer.precision == "bfloat16" and bound is not None and bound < 0.5:
        raise UserError(
            f"rollout.max_logprob_diff={bound:g} with trainer.precision=bfloat16 would stop every run: single tokens "
            "differ by 1 and more in bf16; set rollout.max_logprob_diff=null"
        )
    if rollout.temperature == 0:
        raise UserError("rollout.temperature=0.0: expected a number over 0: greedy completions are all alike")
    target = str(rollout.engine["_target_"])
    engine = target.rsplit(".", 1)[-1]
    if rollout.staleness:
        _check_staleness(settings, engine, constant_of(target, "samples_beside_training", False))
    guides = [name for name in ("regex", "json_schema", "choice") if getattr(rollout, name)]
    if len(guides) > 1:
        raise UserError(
            f"rollout.{guides[0]} and rollout.{guides[1]} are two ways to guide a completion: set one of them"
        )
    if guides and not constant_of(target, "guides_completions", False):
        raise UserError(f"rollout.{guides[0]}: {engine} does not guide completions; use rollout=vllm")


def _check_staleness(settings: Config, engine: str, samples_beside_training: bool) -> None:
    key = f"rollout.staleness={settings.rollout.staleness}"
    if not samples_beside_training:
        raise UserError(
            f"{key} has nobody to sample beside the update: {engine} works in the trainer's process; use "
            "rollout=vllm_server"
        )
    if not settings.algorithm.corrections:
        raise UserError(
            f"{key} trains on completions of older weights: correct for it, with +algorithm.corrections.tis="
            "{_target_: rlpost.objective.corrections.ImportanceSampling}"
        )
    if settings.algorithm.max_attempts > 1:
        raise UserError(
            f"{key} with algorithm.max_attempts={settings.algorithm.max_attempts}: a step is sampled before it is known "
            "what a filter leaves of the ones before; set one of them to its default"
        )


def check_context(settings: Config) -> None:
    """Prompt and completion must fit the model's context; where that is not known yet, the worker checks."""
    context = build(settings.model).context_length()
    prompt, completion = settings.prompt.max_tokens, settings.rollout.max_tokens
    if context is not None and prompt + completion > context:
        raise UserError(
            f"prompt.max_tokens={prompt} + rollout.max_tokens={completion} = {prompt + completion} is "
            f"over the model's context of {context} tokens; lower one of them"
        )
