"""What a launcher starts: a run directory becomes objects, and the loop runs.

Exit codes: 0 finished; 1 failed while running; 2 the configuration or the input is wrong; 130 interrupted.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until the loop starts: imports make a million objects that stay, and each collection walks them all

import atexit
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging as transformers_logging

from rlpost import distributed
from rlpost.cluster.node import name_process
from rlpost.cluster.ranks import LOST_PEERS
from rlpost.config.build import build, flat, reward_nodes
from rlpost.data.mixture import named
from rlpost.data.prompts import PromptFormat
from rlpost.data.stream import PromptStream
from rlpost.data.vision import Vision
from rlpost.errors import UserError
from rlpost.evaluate import Correctness, Evaluator
from rlpost.loop import Interrupted, Loop, LoopSettings
from rlpost.models.sources import (
    context_of,
    end_token_ids,
    load_processor,
    load_tokenizer,
    placeholder_token_ids,
    takes_images,
)
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.objective.matmul import has_bfloat16
from rlpost.objective.objective import Objective
from rlpost.record import provenance
from rlpost.record.mlflow_sink import MlflowSink
from rlpost.record.progress import StepProgress
from rlpost.record.rundir import RunDir
from rlpost.record.tracker import Tracker
from rlpost.rewards.combine import RewardSum
from rlpost.rewards.processes import ScoringProcesses
from rlpost.rollout.engine import Sampling, with_own_settings
from rlpost.rollout.episodes import Episodes, ReplyFormat
from rlpost.trainer import model as trainer_model
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.lora import WithoutAdapters, add_adapters
from rlpost.trainer.policy import Policy, UpdateSettings, make_optimizer, make_scheduler

log = logging.getLogger("rlpost")


class StopFlag:
    """Set by SIGINT or SIGTERM; the loop stops at the next safe point. A second signal ends the process at once."""

    def __init__(self) -> None:
        self._is_set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return self._is_set

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
        log.warning("%s: stopping after a checkpoint (again: at once)", signal.Signals(number).name)


def main(run_dir: str, meeting: str | None = None) -> int:
    """Args: meeting: the descriptor of the socket at which the other ranks find rank 0, which has it from its launcher."""
    run = RunDir(Path(run_dir))
    stop = StopFlag()
    distributed.init(None if meeting is None else int(meeting))
    name_process(f"rlpost rank {distributed.rank()}")
    _set_up_logging(run.path / "run.log")
    tracker: Tracker | None = None
    loop: Loop | None = None
    try:
        loop, progress = _assemble(run, stop)
        tracker = loop.tracker
        age = time.time() - psutil.Process().create_time()
        log.info("ready for the first step: %.2f s, %.2f core-seconds of this process", age, time.process_time())
        gc.freeze()
        gc.enable()
        with progress:
            evaluation = loop.run(progress)
        if tracker:
            _finish(run, loop, evaluation, progress)
        return 0
    except Interrupted:
        _end(run, tracker, "interrupted", "KILLED", step=loop.step)
        return 130
    except KeyboardInterrupt:
        _end(run, tracker, "interrupted", "KILLED")
        return 130
    except UserError as error:
        log.error("%s", error)
        _end(run, tracker, "failed", "FAILED", error=str(error), kind="configuration")
        return 2
    except FloatingPointError as error:
        log.error("%s", error)
        _end(run, tracker, "failed", "FAILED", error=str(error), kind="diverged")
        return 1
    except Exception as error:
        logging.getLogger("rlpost.trace").debug("%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        if distributed.is_loss_of_peers(error):  # another rank says why, or its launcher
            log.info("%s", reason)
            _end(run, tracker, "failed", "FAILED", error=reason, kind="lost peers")
            return LOST_PEERS
        log.error("%s (the traceback is in %s)", reason, run.path / "run.log")
        _end(run, tracker, "failed", "FAILED", error=reason)
        return 1
    finally:
        if loop is not None:
            if distributed.world_size() == 1:  # others may be gone, and the writers would wait for them
                _finish_writing(loop)
            gc.freeze()  # vLLM collects garbage several times as it ends, too
            loop.close()
        distributed.shutdown()


def _assemble(run: RunDir, stop: StopFlag) -> tuple[Loop, StepProgress]:
    """Objects from the configuration, cheap checks first, and the newest checkpoint into them."""
    started = time.perf_counter()
    cfg = run.config()
    main_rank = distributed.is_main()
    checkpoints = Checkpoints(run.path / "checkpoints", cfg.checkpoint.keep)
    latest = checkpoints.latest()

    reward = _reward(cfg)
    source = build(cfg.model)
    directory = source.directory()
    tokenizer = load_tokenizer(directory, source.trust_remote_code)
    vision = Vision(load_processor(directory, source.trust_remote_code)) if takes_images(directory) else None
    end_tokens = end_token_ids(directory, tokenizer)
    max_model_len = cfg.prompt.max_tokens + cfg.rollout.max_tokens
    if (context := context_of(directory)) is not None and max_model_len > context:
        raise UserError(
            f"prompt.max_tokens + rollout.max_tokens = {max_model_len} is over the model's context of {context}"
        )
    task = build(cfg.task)
    data = task.load()
    prompt_format = PromptFormat(**cfg.prompt)
    environment = None if cfg.environment is None else build(cfg.environment)
    tools = getattr(environment, "tools", ())
    train, kept = ([named(e, task.name) for e in examples] for examples in (data.train, data.held_out))
    prompts = prompt_format.apply(train, vision or tokenizer, "training", tools)
    held_out = prompt_format.apply(kept[: cfg.evaluation.max_prompts], vision or tokenizer, "held-out", tools)
    reward.wait_until_ready()
    objective = _objective(cfg)
    advantage = build(cfg.algorithm.advantage)

    saved = checkpoints.peek(latest) if latest else {}
    tracker = _tracker(run, cfg, saved.get("mlflow_run_id")) if main_rank else None
    if tracker:
        run.set_state("running", mlflow_run_id=tracker.mlflow_run_id)

    restrictions = {
        "stop": tuple(cfg.rollout.stop),
        "bad_words": tuple(cfg.rollout.bad_words),
        "logit_bias": dict(cfg.rollout.logit_bias),
        "regex": cfg.rollout.regex,
        "json_schema": cfg.rollout.json_schema,
        "choice": tuple(cfg.rollout.choice),
        "excluded": placeholder_token_ids(directory),
    }
    sampling = Sampling(
        max_tokens=cfg.rollout.max_tokens,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        min_p=cfg.rollout.min_p,
        repetition_penalty=cfg.rollout.repetition_penalty,
        **restrictions,
    )
    if cfg.rollout.per_prompt is not None:
        prompts = with_own_settings(prompts, cfg.rollout.per_prompt, sampling)
        held_out = with_own_settings(held_out, cfg.rollout.per_prompt, sampling)
    is_plain = all(sampling.of(prompt).is_plain for prompt in prompts)
    policy = _policy(cfg, directory, source.trust_remote_code, vision, objective, sampling, is_plain)
    gc.freeze()  # vLLM collects garbage several times as it starts
    engine = build(
        cfg.rollout.engine,
        directory=directory,
        end_token_ids=end_tokens,
        max_model_len=max_model_len,
        trust_remote_code=source.trust_remote_code,
    )
    if environment is not None:
        engine = Episodes(engine, environment, ReplyFormat(vision or tokenizer, end_tokens), cfg.rollout.max_turns)
    correct = Correctness(
        cfg.evaluation.correct_function or next(iter(reward_nodes(cfg))), cfg.evaluation.correct_threshold
    )
    loop = Loop(
        stream=PromptStream(prompts, cfg.seed, data.weights, cfg.stream.curriculum),
        engine=engine,
        reward=reward,
        advantage=advantage,
        policy=policy,
        evaluator=Evaluator(
            prompts=held_out,
            engine=engine,
            reward=reward,
            correct=correct,
            sampling=Sampling(
                max_tokens=cfg.rollout.max_tokens,
                temperature=cfg.evaluation.temperature,
                **restrictions,
            ),
            num_samples=cfg.evaluation.num_samples,
            pass_at=cfg.evaluation.pass_at,
            seed=cfg.seed,
        ),
        correct=correct,
        sampling=sampling,
        checkpoints=checkpoints,
        settings=LoopSettings(
            steps=cfg.steps,
            prompts_per_step=cfg.prompts_per_step,
            samples_per_prompt=cfg.samples_per_prompt,
            seed=cfg.seed,
            max_attempts=cfg.algorithm.max_attempts,
            kl_in_reward=cfg.algorithm.kl.coef if cfg.algorithm.kl.place == "reward" else 0.0,
            normalize_each_reward=cfg.algorithm.multi_reward == "normalize_then_sum",
            eval_every=cfg.evaluation.every,
            eval_at_start=cfg.evaluation.at_start,
            eval_at_end=cfg.evaluation.at_end,
            checkpoint_every=cfg.checkpoint.every,
            checkpoint_at_end=cfg.checkpoint.at_end,
            staleness=cfg.rollout.staleness,
        ),
        tracker=tracker,
        stop_requested=stop,
        group_filter=None if cfg.algorithm.filter is None else build(cfg.algorithm.filter),
        reward_processing=[build(node) for node in cfg.algorithm.reward_processing.values()],
    )
    if latest:
        state = checkpoints.load(latest, policy)
        loop.step, loop.tokens = state["step"], state["tokens"]
        loop.stream.load_state_dict(state["stream"])
        if "advantage" in state:
            advantage.load_state_dict(state["advantage"])
        engine.load_weights(policy.named_weights(), loop.step)
        loop.restore_ahead(checkpoints.ahead(latest))
    if tracker:
        tracker.resume_after(loop.step)
    progress = StepProgress(cfg.steps, loop.step, enabled=main_rank)
    progress.say(
        f"{cfg.name}: {cfg.steps} steps of {cfg.prompts_per_step} prompts x {cfg.samples_per_prompt} samples, "
        f"{len(prompts)} training and {len(held_out)} held-out prompts of {task.name}, "
        + (f"going on after step {loop.step}, " if latest else "")
        + f"ready in {time.perf_counter() - started:.0f} s"
    )
    return loop, progress


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


def _policy(
    cfg: DictConfig,
    directory: Path,
    trust_remote_code: bool,
    vision: Vision | None,
    objective: Objective,
    sampling: Sampling,
    is_plain: bool,
) -> Policy:
    """Args: is_plain: whether every prompt's tokens come from the softmax alone."""
    torch.manual_seed(cfg.seed)
    t = cfg.trainer
    distributed.split_context(t.context_parallel)
    mesh = distributed.sharding_mesh(t.replicas)
    distribution = SamplingDistribution(
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.excluded
    )

    def scorer(checkpointing: bool) -> trainer_model.TokenScorer:
        language_model = trainer_model.load(directory, t.layout, trust_remote_code)
        if t.lora.rank:
            add_adapters(language_model, t.lora.rank, t.lora.alpha, t.lora.targets)
        return trainer_model.shard(
            language_model, distribution, mesh, t.precision, checkpointing, vision, t.cpu_offload
        )

    policy_scorer = scorer(t.activation_checkpointing)
    reference = None
    if cfg.algorithm.kl.coef > 0 or cfg.algorithm.kl.measure:
        reference = WithoutAdapters(policy_scorer) if t.lora.rank else scorer(False)
    o = cfg.optimizer
    optimizer = make_optimizer(policy_scorer, o.lr, o.betas, o.eps, o.weight_decay)
    a = cfg.algorithm
    scheduler = make_scheduler(optimizer, o.schedule, o.warmup_steps, cfg.steps * a.num_mini_batches * a.num_epochs)
    max_logprob_diff = cfg.rollout.max_logprob_diff
    if t.precision == "bfloat16" and distributed.device().type == "cpu" and not has_bfloat16():
        log.warning("this CPU has no bfloat16 instructions: trainer.precision=float32 is several times as fast on it")
    if not is_plain and max_logprob_diff is not None:
        log.warning(
            "top_p, top_k, min_p, a penalty, a bias or a guide: the engine's log-probabilities are of a distribution whose "
            "edges the trainer's rounding can miss, so rollout.max_logprob_diff is reported and not enforced"
        )
        max_logprob_diff = None
    settings = UpdateSettings(
        max_completion_tokens=cfg.rollout.max_tokens,
        num_mini_batches=a.num_mini_batches,
        num_epochs=a.num_epochs,
        micro_batch_tokens=t.micro_batch_tokens,
        max_grad_norm=o.max_grad_norm,
        mask_truncated=a.mask_truncated,
        top_entropy_share=a.top_entropy_share,
        reference_every=a.kl.reference_every,
        reference_mix=a.kl.reference_mix,
        max_logprob_diff=max_logprob_diff,
        seed=cfg.seed,
    )
    return Policy(policy_scorer, reference, objective, optimizer, scheduler, settings)


def _tracker(run: RunDir, cfg: DictConfig, mlflow_run_id: str | None) -> Tracker:
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
    return Tracker(run.path, sink, cfg.tracking.completions_every, cfg.tracking.traces)


def _finish(run: RunDir, loop: Loop, evaluation: dict[str, float], progress: StepProgress) -> None:
    tracker = loop.tracker
    rows = [row for row in tracker.summary() if row["step"] > 0]

    def mean_reward(chosen: list[dict[str, Any]]) -> float | None:
        known = [row["reward/mean"] for row in chosen if row["reward/mean"] is not None]
        return sum(known) / len(known) if known else None

    result = {
        "steps": loop.step,
        "tokens": loop.tokens,
        "reward_first": mean_reward(rows[:1]),
        "reward_last_5": mean_reward(rows[-5:]),
        "logprob_diff_max": max(row["rollout/logprob_diff_max"] for row in rows),
        "seconds": sum(row["time/step"] for row in rows),
        **evaluation,
        "mlflow_run_id": tracker.mlflow_run_id,
    }
    run.write_result(result)
    run.set_state("finished", step=loop.step)
    tracker.close("FINISHED", [run.path / "result.json", run.path / "metrics.jsonl"])
    shown = {k: v for k, v in result.items() if v is not None}
    progress.say("")
    for name, value in shown.items():
        progress.say(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")
    progress.say(f"  {'run directory':<28} {run.path}")


def _finish_writing(loop: Loop) -> None:
    """Let a checkpoint that is being written become whole, whatever ended the run."""
    try:
        loop.checkpoints.finish()
    except RuntimeError as error:
        log.error("%s", error)


def _end(run: RunDir, tracker: Tracker | None, state: Any, mlflow_status: Any, **details: Any) -> None:
    """The main rank writes the state; of a failure also the rank whose fault it was, which the others only lost."""
    lost_peers = details.get("kind") == "lost peers"
    is_told = state == "failed" and run.status().get("state") == "failed"
    if distributed.is_main() and not (lost_peers and is_told):
        run.set_state(state, **details)
    elif state == "failed" and not lost_peers and not is_told:
        run.set_state(state, **{**details, "error": f"rank {distributed.rank()}: {details['error']}"})
    if tracker:
        tracker.close(mlflow_status)


def _set_up_logging(file: Path) -> None:
    """Everything to run.log; warnings, and what rlpost has to say, to the terminal too."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    logging.getLogger("rlpost").setLevel(logging.DEBUG)
    rank = f"[{distributed.rank()}] " if distributed.world_size() > 1 else ""
    to_file = logging.FileHandler(file)
    to_file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {rank}%(name)s: %(message)s"))
    root.addHandler(to_file)
    logging.captureWarnings(True)
    transformers_logging.disable_progress_bar()
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setFormatter(logging.Formatter(f"rlpost: {rank}%(message)s"))
    to_terminal.setLevel(logging.WARNING)
    to_terminal.addFilter(logging.Filter("rlpost"))
    root.addHandler(to_terminal)


def _leave(code: int) -> NoReturn:
    """End the process as it stands: taking a million objects of vLLM and torch apart one by one takes seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(*sys.argv[1:]))
