"""From a run's configuration to the objects of its loop: a builder for each, cheap checks first."""

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rlpost import distributed
from rlpost.config.build import build, correct_function, correct_function_by_task, flat, reward_nodes
from rlpost.data.mixture import named
from rlpost.data.prompts import PromptFormat
from rlpost.data.stream import PromptStream
from rlpost.data.vision import Vision
from rlpost.errors import UserError
from rlpost.evaluate import Correctness, Evaluator
from rlpost.loop import Loop, LoopSettings
from rlpost.models.sources import (
    context_of,
    end_token_ids,
    load_processor,
    load_tokenizer,
    placeholder_token_ids,
    takes_images,
)
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
from rlpost.rollout.sampler import Sampler, SamplerSettings
from rlpost.trainer import model as trainer_model
from rlpost.trainer.advantages import StepAdvantages
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.lora import WithoutAdapters, add_adapters
from rlpost.trainer.policy import Policy, UpdateSettings, make_optimizer, make_scheduler
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
        """Whatever turns chat messages into token ids."""
        return self.vision or self.tokenizer


@dataclass(frozen=True)
class Prompts:
    """A task's prompts, as the model's token ids."""

    train: list[Prompt]
    held_out: list[Prompt]
    weights: Mapping[str, float]  # shares by task, of a mixture
    task: str


def assemble(run: RunDir, stop_requested: Callable[[], bool]) -> Loop:
    """Objects from the configuration, and the newest checkpoint into them.

    The tracking run is ended if this fails after it was opened.

    Raises: UserError for whatever a user can mend.
    """
    started = time.perf_counter()
    cfg = run.config()
    checkpoints = Checkpoints(run.path / "checkpoints", cfg.checkpoint.keep)
    latest = checkpoints.latest()
    reward = _reward(cfg)
    model = _model(cfg)
    environment = None if cfg.environment is None else build(cfg.environment)
    sampling = _sampling(cfg, model)
    prompts = _prompts(cfg, model, sampling, getattr(environment, "tools", ()))
    reward.wait_until_ready()
    objective = _objective(cfg)
    advantage = build(cfg.algorithm.advantage)
    tracker = _tracker(run, cfg, checkpoints.peek(latest)["mlflow_run_id"] if latest else None)
    try:
        policy = _policy(cfg, model, objective, sampling, prompts)
        gc.freeze()  # vLLM collects garbage several times as it starts
        engine = _engine(cfg, model, environment)
        sampler = _sampler(cfg, prompts, engine, reward, sampling)
        threshold = cfg.evaluation.correct_threshold
        correct = Correctness(correct_function(cfg), threshold, correct_function_by_task(cfg))
        loop = Loop(
            sampler,
            _advantages(cfg, advantage, policy, reward),
            policy,
            _evaluator(cfg, prompts, sampler, correct, sampling),
            checkpoints,
            Recorder(tracker, StepProgress(cfg.steps, enabled=distributed.is_main()), correct),
            _loop_settings(cfg),
            stop_requested,
            _stateful({"advantage": advantage, **objective.hooks, **sampler.hooks, **reward.hooks}),
        )
        if latest:
            loop.restore(checkpoints.load(latest, policy)["step"], checkpoints.parts(latest))
    except BaseException as error:
        if tracker:
            tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    if tracker:
        tracker.resume_after(loop.step)
    _say_ready(cfg, loop, prompts, time.perf_counter() - started)
    return loop


def _say_ready(cfg: DictConfig, loop: Loop, prompts: Prompts, seconds: float) -> None:
    loop.recorder.progress.start_after(loop.step)
    loop.recorder.progress.say(
        f"{cfg.name}: {cfg.steps} steps of {cfg.prompts_per_step} prompts x {cfg.samples_per_prompt} samples, "
        f"{len(prompts.train)} training and {len(prompts.held_out)} held-out prompts of {prompts.task}, "
        + (f"going on after step {loop.step}, " if loop.step else "")
        + f"ready in {seconds:.0f} s"
    )


def _stateful(parts: Mapping[str, Any]) -> dict[str, Stateful]:
    """The parts of the algorithm that remember something from step to step."""
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


def _reward(cfg: DictConfig) -> RewardSum:
    nodes = reward_nodes(cfg)
    beside = {name: node.target for name, node in nodes.items() if node.runs_in == "processes"}
    processes = None
    if beside:
        processes = ScoringProcesses(
            "rlpost.rewards.worker", list(beside), beside, cfg.scoring.processes, cfg.scoring.timeout
        )
    only = {name: frozenset(node.tasks) for name, node in nodes.items() if node.tasks is not None}
    here = {name: build(node.target) for name, node in nodes.items() if name not in beside}
    weights = {name: node.weight for name, node in nodes.items()}
    return RewardSum(here, weights, processes, cfg.scoring.on_error, cfg.scoring.timeout, only)


def _model(cfg: DictConfig) -> Model:
    source = build(cfg.model)
    directory = source.directory()
    tokenizer = load_tokenizer(directory, source.trust_remote_code)
    vision = Vision(load_processor(directory, source.trust_remote_code)) if takes_images(directory) else None
    end_tokens = end_token_ids(directory, tokenizer)
    max_len = cfg.prompt.max_tokens + cfg.rollout.max_tokens
    if (context := context_of(directory)) is not None and max_len > context:
        raise UserError(f"prompt.max_tokens + rollout.max_tokens = {max_len} is over the model's context of {context}")
    return Model(directory, tokenizer, vision, end_tokens, max_len, source.trust_remote_code)


def _sampling(cfg: DictConfig, model: Model) -> Sampling:
    r = cfg.rollout
    return Sampling(
        max_tokens=r.max_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        repetition_penalty=r.repetition_penalty,
        stop=tuple(r.stop),
        bad_words=tuple(r.bad_words),
        logit_bias=dict(r.logit_bias),
        excluded=placeholder_token_ids(model.directory),
        regex=r.regex,
        json_schema=r.json_schema,
        choice=tuple(r.choice),
    )


def _prompts(cfg: DictConfig, model: Model, sampling: Sampling, tools: Any) -> Prompts:
    task = build(cfg.task)
    data = task.load()
    prompt_format = PromptFormat(**cfg.prompt)
    train, kept = ([named(e, task.name) for e in examples] for examples in (data.train, data.held_out))
    prompts = prompt_format.apply(train, model.template, "training", tools)
    held_out = (
        prompt_format.apply(kept[: cfg.evaluation.max_prompts], model.template, "held-out", tools) if kept else []
    )
    if cfg.rollout.per_prompt is not None:
        prompts = with_own_settings(prompts, cfg.rollout.per_prompt, sampling)
        held_out = with_own_settings(held_out, cfg.rollout.per_prompt, sampling)
    return Prompts(prompts, held_out, data.weights, task.name)


def _objective(cfg: DictConfig) -> Objective:
    return Objective(
        loss=build(cfg.algorithm.loss),
        reducer=build(cfg.reducer),
        corrections={name: build(node) for name, node in cfg.algorithm.corrections.items()},
        kl_coef=cfg.algorithm.kl.coef if cfg.algorithm.kl.place == "loss" else 0.0,
        kl_estimator=cfg.algorithm.kl.estimator,
        kl_unbiased=cfg.algorithm.kl.unbiased,
        kl_reducer=cfg.algorithm.kl.reducer,
        entropy_coef=cfg.algorithm.entropy_coef,
    )


def _policy(cfg: DictConfig, model: Model, objective: Objective, sampling: Sampling, prompts: Prompts) -> Policy:
    torch.manual_seed(cfg.seed)
    t, o, a = cfg.trainer, cfg.optimizer, cfg.algorithm
    distributed.split_context(t.context_parallel)
    mesh = distributed.sharding_mesh(t.replicas)

    def scorer(checkpointing: bool) -> trainer_model.TokenScorer:
        language_model = trainer_model.load(model.directory, t.layout, model.trust_remote_code)
        if t.lora.rank:
            add_adapters(language_model, t.lora.rank, t.lora.alpha, t.lora.targets)
        return trainer_model.shard(
            language_model, sampling.distribution(), mesh, t.precision, checkpointing, model.vision, t.cpu_offload
        )

    trained = scorer(t.activation_checkpointing)
    reference = None
    if a.kl.coef > 0 or a.kl.measure:
        reference = WithoutAdapters(trained) if t.lora.rank else scorer(False)
    optimizer = make_optimizer(trained, o.lr, o.betas, o.eps, o.weight_decay)
    scheduler = make_scheduler(optimizer, o.schedule, o.warmup_steps, cfg.steps * a.num_mini_batches * a.num_epochs)
    if t.precision == "bfloat16" and distributed.device().type == "cpu" and not has_bfloat16():
        log.warning("this CPU has no bfloat16 instructions: trainer.precision=float32 is several times as fast on it")
    is_plain = all(sampling.of(prompt).is_plain for prompt in prompts.train)
    return Policy(trained, reference, objective, optimizer, scheduler, _update_settings(cfg, is_plain))


def _update_settings(cfg: DictConfig, is_plain: bool) -> UpdateSettings:
    """Args: is_plain: whether every prompt's tokens come from the softmax alone."""
    a = cfg.algorithm
    max_logprob_diff = cfg.rollout.max_logprob_diff
    if not is_plain and max_logprob_diff is not None:
        log.warning(
            "top_p, top_k, min_p, a penalty, a bias or a guide: the engine's log-probabilities are of a distribution whose "
            "edges the trainer's rounding can miss, so rollout.max_logprob_diff is reported and not enforced"
        )
        max_logprob_diff = None
    return UpdateSettings(
        max_completion_tokens=cfg.rollout.max_tokens,
        num_mini_batches=a.num_mini_batches,
        num_epochs=a.num_epochs,
        micro_batch_tokens=cfg.trainer.micro_batch_tokens,
        max_grad_norm=cfg.optimizer.max_grad_norm,
        mask_truncated=a.mask_truncated,
        top_entropy_share=a.top_entropy_share,
        reference_every=a.kl.reference_every,
        reference_mix=a.kl.reference_mix,
        max_logprob_diff=max_logprob_diff,
        seed=cfg.seed,
    )


def _engine(cfg: DictConfig, model: Model, environment: Any) -> Engine:
    engine = build(
        cfg.rollout.engine,
        directory=model.directory,
        end_token_ids=model.end_tokens,
        max_model_len=model.max_len,
        trust_remote_code=model.trust_remote_code,
    )
    if environment is None:
        return engine
    return Episodes(engine, environment, ReplyFormat(model.template, model.end_tokens), cfg.rollout.max_turns)


def _sampler(cfg: DictConfig, prompts: Prompts, engine: Engine, reward: RewardSum, sampling: Sampling) -> Sampler:
    a = cfg.algorithm
    return Sampler(
        PromptStream(prompts.train, cfg.seed, prompts.weights, cfg.stream.curriculum),
        engine,
        reward,
        sampling,
        SamplerSettings(
            num_steps=cfg.steps,
            prompts_per_step=cfg.prompts_per_step,
            samples_per_prompt=cfg.samples_per_prompt,
            seed=cfg.seed,
            max_attempts=a.max_attempts,
            staleness=cfg.rollout.staleness,
        ),
        None if a.filter is None else build(a.filter),
        {name: build(node) for name, node in a.reward_processing.items()},
    )


def _advantages(cfg: DictConfig, advantage: Any, policy: Policy, reward: RewardSum) -> StepAdvantages:
    kl = cfg.algorithm.kl
    each = cfg.algorithm.multi_reward == "normalize_then_sum"
    return StepAdvantages(advantage, policy, kl.coef if kl.place == "reward" else 0.0, reward.weights if each else None)


def _evaluator(
    cfg: DictConfig, prompts: Prompts, sampler: Sampler, correct: Correctness, sampling: Sampling
) -> Evaluator | None:
    e = cfg.evaluation
    if not prompts.held_out:
        return None
    return Evaluator(
        prompts.held_out, sampler, correct, sampling.for_evaluation(e.temperature), e.num_samples, e.pass_at
    )


def _loop_settings(cfg: DictConfig) -> LoopSettings:
    return LoopSettings(
        steps=cfg.steps,
        eval_every=cfg.evaluation.every,
        eval_at_start=cfg.evaluation.at_start,
        eval_at_end=cfg.evaluation.at_end,
        checkpoint_every=cfg.checkpoint.every,
        checkpoint_at_end=cfg.checkpoint.at_end,
    )


def _tracker(run: RunDir, cfg: DictConfig, mlflow_run_id: str | None) -> Tracker | None:
    """The record of the run, on the main rank."""
    if not distributed.is_main():
        return None
    sink = None
    if cfg.tracking.uri:
        sink = MlflowSink(
            uri=cfg.tracking.uri,
            experiment=cfg.tracking.experiment,
            run_name=cfg.tracking.run_name or run.path.name,
            parent_run_id=cfg.tracking.parent_run_id,
            params=flat(OmegaConf.to_container(cfg)),
            tags={
                "run_dir": str(run.path),
                "config_hash": provenance.config_hash(cfg),
                "seed": str(cfg.seed),
                **cfg.tracking.tags,
                **provenance.git_state(Path(__file__).parent),
                **provenance.versions(),
            },
            files=[run.path / "config.yaml", run.path / "overrides.yaml"],
            artifacts=cfg.tracking.artifacts,
            run_id=mlflow_run_id or run.status().get("mlflow_run_id"),
        )
    tracker = Tracker(run.path, sink, cfg.tracking.completions_every, cfg.tracking.traces)
    run.set_state("running", mlflow_run_id=tracker.mlflow_run_id)
    return tracker
