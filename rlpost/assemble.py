"""The builders that make the objects of a run's loop from its configuration, cheap checks first."""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from rlpost import distributed
from rlpost.config.build import (
    build,
    build_metric,
    correct_function,
    correct_function_by_task,
    flat,
    reward_nodes,
)
from rlpost.config.schema import Config
from rlpost.data.mixture import named
from rlpost.data.packing import Layout
from rlpost.data.prompts import PromptFormat
from rlpost.data.stream import PromptStream
from rlpost.data.tasks import Task
from rlpost.data.vision import Vision
from rlpost.environments.protocol import Environment
from rlpost.errors import UserError
from rlpost.evaluate import Correctness, Evaluator
from rlpost.loop import Loop
from rlpost.models.sources import (
    ModelSource,
    context_of,
    end_token_ids,
    load_processor,
    load_tokenizer,
    placeholder_token_ids,
    takes_images,
)
from rlpost.objective.advantages import Advantage
from rlpost.objective.matmul import has_bfloat16
from rlpost.objective.objective import Objective
from rlpost.record import provenance
from rlpost.record.mlflow_sink import MlflowSink
from rlpost.record.progress import StepProgress
from rlpost.record.recorder import Recorder
from rlpost.record.rundir import RunDir
from rlpost.record.tracker import Tracker
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.processes import ScoringProcesses
from rlpost.rollout.engine import Engine, Sampling, with_own_settings
from rlpost.rollout.episodes import Episodes, ReplyFormat
from rlpost.rollout.sampler import Sampler
from rlpost.trainer import model as trainer_model
from rlpost.trainer.advantages import StepAdvantages
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.lora import WithoutAdapters, add_adapters
from rlpost.trainer.optimizer import OptimizerFactory
from rlpost.trainer.policy import Policy
from rlpost.types import Prompt, Stateful

log = logging.getLogger("rlpost")


@dataclass(frozen=True)
class Model:
    """The model that is trained, as far as its directory tells."""

    directory: Path
    tokenizer: Any
    vision: Vision | None
    end_tokens: tuple[int, ...]
    max_len: int  # tokens of the longest prompt and completion together
    trust_remote_code: bool

    @property
    def template(self) -> Any:
        """The processor or the tokenizer, which turns chat messages into token ids."""
        return self.vision or self.tokenizer


@dataclass(frozen=True)
class Prompts:
    """A task's prompts, as the model's token ids."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    weights: Mapping[str, float]  # shares by task, of a mixture
    task: str


def assemble(run: RunDir, stop_requested: Callable[[], bool]) -> Loop:
    """Objects from the configuration, and the newest checkpoint into them.

    The tracking run is ended if this fails after it was opened.

    Raises: UserError for whatever a user can mend.
    """
    started = time.perf_counter()
    settings = run.settings()
    checkpoints = Checkpoints(run.path / "checkpoints", settings.checkpoint.keep)
    reward = _reward(settings)
    model = _model(settings)
    environment: Environment | None = build(settings.environment) if settings.environment else None
    sampling = Sampling.from_settings(settings.rollout, placeholder_token_ids(model.directory))
    prompts = _prompts(settings, model, sampling, getattr(environment, "tools", ()))
    reward.wait_until_ready()
    latest = checkpoints.latest()
    tracker = _tracker(run, settings, checkpoints.peek(latest)["mlflow_run_id"] if latest else None)
    try:
        policy = _policy(settings, model, sampling, prompts)
        gc.freeze()  # vLLM collects garbage several times as it starts
        sampler = _sampler(settings, prompts, _engine(settings, model, environment), reward, sampling)
        loop = _loop(settings, policy, sampler, prompts, checkpoints, tracker, stop_requested)
        if latest:
            loop.restore(checkpoints.load(latest, policy)["step"], checkpoints.parts(latest))
    except BaseException as error:
        if tracker:
            tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    if tracker:
        tracker.resume_after(loop.step)
    _say_ready(settings, loop, prompts, time.perf_counter() - started)
    return loop


def _loop(
    settings: Config,
    policy: Policy,
    sampler: Sampler,
    prompts: Prompts,
    checkpoints: Checkpoints,
    tracker: Tracker | None,
    stop_requested: Callable[[], bool],
) -> Loop:
    advantages = _advantages(settings, policy)
    threshold = settings.evaluation.correct_threshold
    correct = Correctness(correct_function(settings), threshold, correct_function_by_task(settings))
    metrics = {name: build_metric(name, given) for name, given in settings.metrics.items()}
    hooks = {"advantage": advantages.advantage, **policy.hooks, **sampler.hooks}
    return Loop(
        sampler,
        advantages,
        policy,
        Evaluator(prompts.held_out, sampler, correct, sampler.sampling, settings.evaluation)
        if prompts.held_out
        else None,
        checkpoints,
        Recorder(tracker, StepProgress(settings.steps, enabled=distributed.is_main()), correct, metrics),
        settings.steps,
        settings.evaluation,
        settings.checkpoint,
        stop_requested,
        {name: part for name, part in hooks.items() if isinstance(part, Stateful)},
    )


def _say_ready(settings: Config, loop: Loop, prompts: Prompts, seconds: float) -> None:
    loop.recorder.progress.start_after(loop.step)
    loop.recorder.progress.say(
        f"{settings.name}: {settings.steps} steps of {settings.prompts_per_step} prompts x "
        f"{settings.samples_per_prompt} samples, {len(prompts.train)} training and {len(prompts.held_out)} held-out "
        f"prompts of {prompts.task}, "
        + (f"going on after step {loop.step}, " if loop.step else "")
        + f"ready in {seconds:.0f} s"
    )


def _reward(settings: Config) -> RewardSum:
    nodes, scoring = reward_nodes(settings), settings.scoring
    beside = {name: node.target for name, node in nodes.items() if node.runs_in == "processes"}
    processes = None
    if beside:
        processes = ScoringProcesses("rlpost.rewards.worker", list(beside), beside, scoring.processes, scoring.timeout)
    only = {name: frozenset(node.tasks) for name, node in nodes.items() if node.tasks is not None}
    here = {name: build(node.target) for name, node in nodes.items() if name not in beside}
    return RewardSum(here, {name: node.weight for name, node in nodes.items()}, processes, scoring, only)


def _model(settings: Config) -> Model:
    source: ModelSource = build(settings.model)
    directory = source.directory()
    tokenizer = load_tokenizer(directory, source.trust_remote_code)
    vision = Vision(load_processor(directory, source.trust_remote_code)) if takes_images(directory) else None
    end_tokens = end_token_ids(directory, tokenizer)
    max_len = settings.prompt.max_tokens + settings.rollout.max_tokens
    if (context := context_of(directory)) is not None and max_len > context:
        raise UserError(f"prompt.max_tokens + rollout.max_tokens = {max_len} is over the model's context of {context}")
    return Model(directory, tokenizer, vision, end_tokens, max_len, source.trust_remote_code)


def _prompts(settings: Config, model: Model, sampling: Sampling, tools: Any) -> Prompts:
    task: Task = build(settings.task)
    data = task.load()
    prompt_format = PromptFormat(**asdict(settings.prompt))

    def prompts_of(examples: Sequence[Any], what: str) -> list[Prompt]:
        if not examples:
            return []
        prompts = prompt_format.apply([named(e, task.name) for e in examples], model.template, what, tools)
        column = settings.rollout.per_prompt
        return prompts if column is None else with_own_settings(prompts, column, sampling)

    held_out = data.held_out[: settings.evaluation.max_prompts]
    return Prompts(prompts_of(data.train, "training"), prompts_of(held_out, "held-out"), data.weights, task.name)


def _objective(settings: Config) -> Objective:
    algorithm = settings.algorithm
    return Objective(
        loss=build(algorithm.loss),
        reducer=build(settings.reducer),
        corrections={name: build(node) for name, node in algorithm.corrections.items()},
        kl=algorithm.kl,
        entropy_coef=algorithm.entropy_coef,
        max_log_ratio=algorithm.max_log_ratio,
    )


def _policy(settings: Config, model: Model, sampling: Sampling, prompts: Prompts) -> Policy:
    torch.manual_seed(settings.seed)  # pyright: ignore[reportUnknownMemberType] - torch leaves its seed untyped
    trainer, algorithm = settings.trainer, settings.algorithm
    distributed.split_context(trainer.context_parallel)
    mesh = distributed.sharding_mesh(trainer.replicas)

    def load(checkpointing: bool) -> trainer_model.PolicyModel:
        language_model = trainer_model.load(model.directory, cast(Layout, trainer.layout), model.trust_remote_code)
        if trainer.lora.rank:
            add_adapters(language_model, trainer.lora)
        own = replace(trainer, activation_checkpointing=checkpointing)
        return trainer_model.shard(language_model, sampling.distribution(), mesh, own, model.vision)

    trained = load(trainer.activation_checkpointing)
    reference = None
    if algorithm.kl.needs_reference:
        reference = WithoutAdapters(trained) if trainer.lora.rank else load(checkpointing=False)
    optimizer: OptimizerFactory = build(settings.optimizer)
    num_optimizer_steps = settings.steps * algorithm.num_mini_batches * algorithm.num_epochs
    if trainer.precision == "bfloat16" and distributed.device().type == "cpu" and not has_bfloat16():
        log.warning("this CPU has no bfloat16 instructions: trainer.precision=float32 is several times as fast on it")
    return Policy(
        trained,
        reference,
        _objective(settings),
        optimizer(trained.parameters(), num_optimizer_steps),
        algorithm,
        micro_batch_tokens=trainer.micro_batch_tokens,
        max_completion_tokens=settings.rollout.max_tokens,
        max_logprob_diff=_max_logprob_diff(settings, sampling, prompts),
        seed=settings.seed,
    )


def _max_logprob_diff(settings: Config, sampling: Sampling, prompts: Prompts) -> float | None:
    """The bound on the difference between engine and trainer, where the trainer knows what the engine samples from."""
    bound = settings.rollout.max_logprob_diff
    if bound is not None and not all(sampling.of(prompt).is_plain for prompt in prompts.train):
        log.warning(
            "top_p, top_k, min_p, a penalty, a bias or a guide: the engine's log-probabilities are of a distribution whose "
            "edges the trainer's rounding can miss, so rollout.max_logprob_diff is reported and not enforced"
        )
        return None
    return bound


def _engine(settings: Config, model: Model, environment: Environment | None) -> Engine:
    engine: Engine = build(
        settings.rollout.engine,
        directory=model.directory,
        end_token_ids=model.end_tokens,
        max_model_len=model.max_len,
        trust_remote_code=model.trust_remote_code,
    )
    if environment is None:
        return engine
    return Episodes(engine, environment, ReplyFormat(model.template, model.end_tokens), settings.rollout.max_turns)


def _sampler(settings: Config, prompts: Prompts, engine: Engine, reward: RewardSum, sampling: Sampling) -> Sampler:
    algorithm = settings.algorithm
    return Sampler(
        PromptStream(prompts.train, settings.seed, prompts.weights, settings.stream.curriculum),
        engine,
        reward,
        sampling,
        settings,
        max_attempts=algorithm.max_attempts,
        staleness=settings.rollout.staleness,
        group_filter=build(algorithm.filter) if algorithm.filter else None,
        reward_processing={name: build(node) for name, node in algorithm.reward_processing.items()},
    )


def _advantages(settings: Config, policy: Policy) -> StepAdvantages:
    algorithm = settings.algorithm
    each = algorithm.multi_reward == "normalize_then_sum"
    weights = [node.weight for node in reward_nodes(settings).values()]
    advantage: Advantage = build(algorithm.advantage)
    return StepAdvantages(advantage, policy, algorithm.kl.reward_coef, weights if each else None)


def _tracker(run: RunDir, settings: Config, mlflow_run_id: str | None) -> Tracker | None:
    """The record of the run, on the main rank."""
    if not distributed.is_main():
        return None
    tracking = settings.tracking
    sink = None
    if tracking.uri:
        sink = MlflowSink(
            uri=tracking.uri,
            experiment=tracking.experiment,
            run_name=tracking.run_name or run.path.name,
            parent_run_id=tracking.parent_run_id,
            params=flat(run.config()),
            tags={
                "run_dir": str(run.path),
                "config_hash": provenance.config_hash(run.config()),
                "seed": str(settings.seed),
                **tracking.tags,
                **provenance.git_state(Path(__file__).parent),
                **provenance.versions(),
            },
            files=[run.path / "config.yaml", run.path / "overrides.yaml"],
            artifacts=tracking.artifacts,
            run_id=mlflow_run_id or run.status().get("mlflow_run_id"),
        )
    tracker = Tracker(run.path, sink, tracking)
    run.set_state("running", mlflow_run_id=tracker.mlflow_run_id)
    return tracker
