"""The rules over a configuration: everything that can be known to be wrong before anything heavy is imported."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from rlpost.cluster.node import num_gpus
from rlpost.config.build import build, nested_nodes, reward_nodes, target_nodes, task_names
from rlpost.config.plugins import split_path
from rlpost.config.schema import Config
from rlpost.config.targets import check_target, read_signature
from rlpost.errors import UserError, nearest


def validate(cfg: DictConfig) -> None:
    """Everything that can be known to be wrong before anything heavy is imported.

    Raises: UserError, one line that names the key.
    """
    _check_missing(cfg)
    _check_known_keys(cfg, Config, "")
    for key, node, injected in target_nodes(cfg):
        for place, inner in nested_nodes(node, key):  # what stands inside is made too
            _check_allowed(inner, place, cfg)
            check_target(inner, place, injected if inner is node else frozenset())
    if str(cfg.reducer._target_).endswith(".FunctionReducer"):
        _check_reducer_function(cfg)
    _check_ranges(cfg)
    _check_sizes(cfg)
    if str(cfg.rollout.engine._target_).endswith(".VLLMServers"):
        _check_servers(cfg)


def _check_reducer_function(cfg: DictConfig) -> None:
    """The function behind reducer=function: its package is allowed, it exists, and it takes the four arguments."""
    path = str(cfg.reducer.path)
    module_name, name = split_path(path, "reducer.path")
    package = Path(module_name).stem if module_name.endswith(".py") else module_name.split(".", 1)[0]
    if package not in cfg.plugins.allow:
        raise UserError(f"reducer.path={path}: add {package} to plugins.allow to import it: plugins.allow=[{package}]")
    signature = read_signature(module_name, name, "reducer.path")
    expected = ["total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"]
    if signature is not None and list(signature.parameters)[:4] != expected:
        raise UserError(
            f"reducer.path={path}: takes ({', '.join(signature.parameters)}); expected ({', '.join(expected)}=False)"
        )


def _check_servers(cfg: DictConfig) -> None:
    """Where rollout servers are: listed, or started by the run."""
    engine, key = cfg.rollout.engine, "rollout.engine"
    urls = engine.get("urls") or []
    num_servers = engine.get("num_servers")
    if num_servers is not None and num_servers < 1:
        raise UserError(f"{key}.num_servers={num_servers}: expected a whole number, at least 1")
    if urls and num_servers is not None:
        raise UserError(f"{key}.urls and {key}.num_servers: servers are listed or started, not both; set one of them")
    places = []
    for url in urls:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise UserError(f"{key}.urls: {url!r} is not a server's address; expected http://host:port")
        places.append((parts.hostname, port))
    if len(set(places)) < len(places):
        raise UserError(f"{key}.urls={list(urls)}: a server is listed twice")
    if urls and len(urls) < _num_ranks(cfg.cluster):
        raise UserError(
            f"{key}.urls lists {len(urls)} servers for the cluster's {_num_ranks(cfg.cluster)} processes, which share them "
            "out; list one for each at least"
        )
    elsewhere = [host for host, _ in places if host not in ("localhost", "127.0.0.1", "::1")]
    if elsewhere and engine.get("weights_dir") is None:
        raise UserError(
            f"{key}.urls: {elsewhere[0]} may be another machine; set {key}.weights_dir to a directory that it and this one see"
        )


def _check_missing(cfg: DictConfig) -> None:
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError(f"{missing[0]} is missing; set {missing[0]}=...")


def _check_known_keys(cfg: DictConfig, schema: type, prefix: str) -> None:
    """`+key=value` adds keys that the schema does not have; a misspelt setting must not pass that way."""
    hints = get_type_hints(schema)
    known = [f.name for f in fields(schema)]
    for key in map(str, cfg):
        if key not in known:
            raise UserError(f"{prefix}{key}: there is no such setting{nearest(key, known)}")
        if is_dataclass(hints[key]):
            _check_known_keys(cfg[key], hints[key], f"{prefix}{key}.")


def _check_allowed(node: Mapping[str, Any], key: str, cfg: DictConfig) -> None:
    target = node.get("_target_")
    if not isinstance(target, str):
        raise UserError(f"{key}: expected a mapping with _target_ (the class or function to use)")
    package = target.split(".", 1)[0]
    if package != "rlpost" and package not in cfg.plugins.allow:
        raise UserError(
            f"{key}._target_={target}: {package} is not rlpost's own code; add it to plugins.allow to let this "
            f"configuration import it: plugins.allow=[{package}]"
        )


def _check_ranges(cfg: DictConfig) -> None:
    at_least_one = [
        *("steps", "prompts_per_step", "samples_per_prompt", "algorithm.num_mini_batches"),
        *(
            "algorithm.num_epochs",
            "algorithm.max_attempts",
            "prompt.max_tokens",
            "rollout.max_tokens",
            "rollout.max_turns",
            "trainer.micro_batch_tokens",
            "trainer.context_parallel",
            "trainer.replicas",
        ),
        *("evaluation.num_samples", "evaluation.max_prompts", "scoring.processes"),
    ]
    if "tensor_parallel" in cfg.rollout.engine:
        at_least_one.append("rollout.engine.tensor_parallel")
    for key in at_least_one:
        _require(cfg, key, lambda v: v >= 1, "a whole number, at least 1")
    not_negative = [
        *("algorithm.kl.coef", "algorithm.entropy_coef", "rollout.temperature", "rollout.top_k", "optimizer.lr"),
        *("optimizer.eps", "optimizer.weight_decay", "optimizer.warmup_steps", "evaluation.every", "seed"),
        *("evaluation.temperature", "checkpoint.every", "tracking.completions_every"),
        "tracking.traces",
        "algorithm.kl.reference_every",
        "rollout.staleness",
        "trainer.lora.rank",
    ]
    for key in not_negative:
        _require(cfg, key, lambda v: v >= 0 and math.isfinite(v), "a finite number, at least 0")
    _require(cfg, "rollout.temperature", lambda v: v > 0, "a number over 0: greedy completions are all alike")
    _require(cfg, "rollout.top_p", lambda v: 0 < v <= 1, "a number over 0 and at most 1")
    _require(cfg, "rollout.min_p", lambda v: 0 <= v <= 1, "a number in 0..1")
    _require(cfg, "rollout.repetition_penalty", lambda v: v > 0, "a number over 0")
    _require(cfg, "optimizer.betas", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers in [0, 1)")
    for key in ("optimizer.max_grad_norm", "rollout.max_logprob_diff", "checkpoint.keep"):
        _require(cfg, key, lambda v: v is None or v > 0, "a number over 0, or null")
    _require(cfg, "scoring.timeout", lambda v: v > 0 and math.isfinite(v), "a number of seconds over 0")
    choices = {
        "algorithm.multi_reward": ["sum_then_normalize", "normalize_then_sum"],
        "algorithm.kl.place": ["loss", "reward"],
        "algorithm.kl.estimator": ["k1", "k2", "k3"],
        "algorithm.kl.reducer": ["sequence_mean", "same"],
        "prompt.template": ["chat", "plain"],
        "prompt.overlong": ["refuse", "filter", "truncate"],
        "optimizer.schedule": ["constant", "linear", "cosine"],
        "trainer.precision": ["float32", "bfloat16"],
        "scoring.on_error": ["fail", "zero", "none"],
        "trainer.layout": ["shared_prefix", "padded"],
    }
    for key, valid in choices.items():
        value = OmegaConf.select(cfg, key)
        if value not in valid:
            raise UserError(f"{key}={value}: {_choice(value, valid)}")
    if "divisor" in cfg.reducer:
        _require(cfg, "reducer.divisor", lambda v: v == "max_tokens" or v > 0, "a number over 0, or max_tokens")
    _require(cfg, "trainer.lora.alpha", lambda v: v > 0, "a number over 0")
    _require(cfg, "algorithm.top_entropy_share", lambda v: v is None or 0 < v <= 1, "a number over 0 and at most 1")
    _require(cfg, "algorithm.kl.reference_mix", lambda v: 0 < v <= 1, "a number over 0 and at most 1")


def _check_sizes(cfg: DictConfig) -> None:
    """Rules over several keys."""
    bound = cfg.rollout.max_logprob_diff
    if cfg.trainer.precision == "bfloat16" and bound is not None and bound < 0.5:
        raise UserError(
            f"rollout.max_logprob_diff={bound:g} with trainer.precision=bfloat16 would stop every run: single tokens "
            "differ by 1 and more in bf16; set rollout.max_logprob_diff=null"
        )
    num_ranks = _num_ranks(cfg.cluster)
    for key in ("context_parallel", "replicas"):
        if num_ranks % cfg.trainer[key]:
            raise UserError(
                f"trainer.{key}={cfg.trainer[key]} does not divide the cluster's {num_ranks} processes: start more of them"
            )
    if num_ranks % (sharing := cfg.rollout.engine.get("tensor_parallel", 1)):
        raise UserError(
            f"rollout.engine.tensor_parallel={sharing} does not divide the cluster's {num_ranks} processes: start more of them"
        )
    num_data_ranks = num_ranks // cfg.trainer.context_parallel
    share = num_data_ranks * cfg.algorithm.num_mini_batches
    if cfg.prompts_per_step % cfg.algorithm.num_mini_batches:
        raise UserError(
            f"prompts_per_step={cfg.prompts_per_step} does not divide into "
            f"algorithm.num_mini_batches={cfg.algorithm.num_mini_batches} equal mini-batches"
        )
    if cfg.prompts_per_step % share:
        raise UserError(
            f"prompts_per_step={cfg.prompts_per_step} does not divide over the cluster's {num_data_ranks} "
            f"{'processes' if num_data_ranks == num_ranks else 'context groups'} x "
            f"algorithm.num_mini_batches={cfg.algorithm.num_mini_batches}; use a multiple of {share}"
        )
    if cfg.trainer.context_parallel > 1 and cfg.trainer.layout != "shared_prefix":
        raise UserError(
            f"trainer.context_parallel={cfg.trainer.context_parallel} splits rows of trainer.layout=shared_prefix, not "
            f"of {cfg.trainer.layout}"
        )
    if cfg.trainer.lora.rank and cfg.algorithm.kl.reference_every:
        raise UserError(
            f"algorithm.kl.reference_every={cfg.algorithm.kl.reference_every}: with trainer.lora.rank="
            f"{cfg.trainer.lora.rank} the reference is the policy without its adapters, which does not move"
        )
    if cfg.rollout.staleness:
        _check_staleness(cfg)
    guides = [name for name in ("regex", "json_schema", "choice") if cfg.rollout[name]]
    if len(guides) > 1:
        raise UserError(
            f"rollout.{guides[0]} and rollout.{guides[1]} are two ways to guide a completion: set one of them"
        )
    if guides and str(cfg.rollout.engine.get("_target_", "")).endswith("TransformersEngine"):
        raise UserError(f"rollout.{guides[0]}: transformers does not guide completions; use rollout=vllm")
    if cfg.algorithm.max_attempts > 1 and cfg.algorithm.filter is None:
        raise UserError(
            f"algorithm.max_attempts={cfg.algorithm.max_attempts} has nothing to refill: set "
            "algorithm.filter._target_=rlpost.rollout.filters.VariedRewards"
        )
    if cfg.algorithm.multi_reward == "normalize_then_sum":
        changed = "algorithm.reward_processing" if cfg.algorithm.reward_processing else None
        if cfg.algorithm.kl.place == "reward" and cfg.algorithm.kl.coef > 0:
            changed = "algorithm.kl.place=reward"
        if changed:
            raise UserError(
                f"algorithm.multi_reward=normalize_then_sum leaves no summed reward for {changed} to change"
            )
    grouped = str(cfg.algorithm.advantage.get("_target_", "")).endswith(".GroupAdvantage")
    if cfg.samples_per_prompt < 2 and grouped:
        raise UserError(
            "samples_per_prompt=1 gives every completion the advantage 0: a group-relative advantage needs at least 2"
        )
    if max(cfg.evaluation.pass_at, default=1) > cfg.evaluation.num_samples:
        raise UserError(
            f"evaluation.pass_at={list(cfg.evaluation.pass_at)} needs evaluation.num_samples of at least "
            f"{max(cfg.evaluation.pass_at)}, not {cfg.evaluation.num_samples}"
        )
    if any(k < 1 for k in cfg.evaluation.pass_at):
        raise UserError(f"evaluation.pass_at={list(cfg.evaluation.pass_at)}: every k must be at least 1")
    if cfg.evaluation.num_samples > 1 and cfg.evaluation.temperature == 0:
        raise UserError(
            f"evaluation.num_samples={cfg.evaluation.num_samples} with evaluation.temperature=0 would sample the "
            "same completion again; set a temperature over 0"
        )
    names = list(reward_nodes(cfg))
    wanted = cfg.evaluation.correct_function
    if wanted is not None and wanted not in names:
        raise UserError(f"evaluation.correct_function={wanted}: {_choice(wanted, names)}")
    for name, node in reward_nodes(cfg).items():
        if not isinstance(node.weight, int | float) or not math.isfinite(node.weight):
            raise UserError(f"reward.{name}.weight={node.weight}: expected a finite number")
        if node.tasks is not None and not (isinstance(node.tasks, list) and node.tasks):
            raise UserError(f"reward.{name}.tasks={node.tasks}: expected a list of the mixture's tasks")
        if unknown := sorted(set(node.tasks or []) - set(task_names(cfg))):
            raise UserError(f"reward.{name}.tasks: {unknown[0]!r}: {_choice(unknown[0], task_names(cfg))}")
        if node.runs_in not in (valid := ["processes", "trainer"]):
            raise UserError(f"reward.{name}.runs_in={node.runs_in}: {_choice(node.runs_in, valid)}")
    _check_context(cfg)


def _check_staleness(cfg: DictConfig) -> None:
    key = f"rollout.staleness={cfg.rollout.staleness}"
    engine = str(cfg.rollout.engine._target_).rsplit(".", 1)[-1]
    if engine in ("VLLMEngine", "TransformersEngine", "PagedTransformersEngine"):
        raise UserError(
            f"{key} has nobody to sample beside the update: {engine} works in the trainer's process; use "
            "rollout=vllm_server"
        )
    if not cfg.algorithm.corrections:
        raise UserError(
            f"{key} trains on completions of older weights: correct for it, with +algorithm.corrections.tis="
            "{_target_: rlpost.objective.corrections.ImportanceSampling}"
        )
    if cfg.algorithm.max_attempts > 1:
        raise UserError(
            f"{key} with algorithm.max_attempts={cfg.algorithm.max_attempts}: a step is sampled before it is known "
            "what a filter leaves of the ones before; set one of them to its default"
        )


def _check_context(cfg: DictConfig) -> None:
    """Prompt and completion must fit the model's context; where that is not known yet, the worker checks."""
    context = build(cfg.model).context_length()
    needed = cfg.prompt.max_tokens + cfg.rollout.max_tokens
    if context is not None and needed > context:
        raise UserError(
            f"prompt.max_tokens={cfg.prompt.max_tokens} + rollout.max_tokens={cfg.rollout.max_tokens} = {needed} is "
            f"over the model's context of {context} tokens; lower one of them"
        )


def _require(cfg: DictConfig, key: str, holds: Any, expected: str) -> None:
    value = OmegaConf.select(cfg, key)
    try:
        ok = holds(value)
    except TypeError:
        ok = False
    if not ok:
        raise UserError(f"{key}={value}: expected {expected}")


def _choice(value: Any, valid: list[str]) -> str:
    close = difflib.get_close_matches(str(value), valid, n=1)
    return f"did you mean {close[0]!r}?" if close else "expected one of " + ", ".join(valid)


def _num_ranks(cluster: DictConfig) -> int:
    """As far as it is known before they are started: a GPU a process is as many as this machine has."""
    if "processes_per_node" in cluster:
        return cluster.nodes * cluster.processes_per_node
    number = cluster.get("num_processes", 1)
    return number if isinstance(number, int) else max(1, num_gpus())
