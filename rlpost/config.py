"""The configuration's schema, the rules over it, and the only caller of Hydra's instantiate.

Fields typed Any hold a `_target_` node: a plug-in point. Its keywords are checked against the target's signature
(`targets.py`). Everything else is typed here. Imports no torch.
"""

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

from rlpost.errors import UserError
from rlpost.plugins import split_path
from rlpost.suggest import nearest
from rlpost.targets import check_target, read_signature


@dataclass
class KLConfig:
    coef: float = 0.0  # over 0 loads a reference model
    measure: bool = False  # load one to report policy/kl_ref, whatever the coefficient
    place: str = "loss"  # or "reward": the sequence's k1 estimate is taken off its reward
    estimator: str = "k3"  # k1, k2, k3 (in the loss)
    unbiased: bool = False  # the estimate times the ratio, whose gradient is the KL's own (in the loss)
    reference_every: int = 0  # steps between moves of the reference towards the policy; 0: it stays
    reference_mix: float = 1.0  # how far it moves: 1 all the way
    reducer: str = "sequence_mean"  # or "same": weighed like the policy gradient


@dataclass
class AlgorithmConfig:
    advantage: Any = MISSING
    loss: Any = MISSING
    multi_reward: str = "sum_then_normalize"  # or normalize_then_sum: each function's own advantages, summed
    corrections: dict[str, Any] = field(default_factory=dict)  # by name: objective/<name>_cut
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    top_entropy_share: float | None = None  # tokens of the highest entropy that give a policy gradient; null: all
    filter: Any = None  # a group filter; null keeps every group
    max_attempts: int = 1  # rounds of sampling to fill a step whose groups the filter leaves out
    reward_processing: dict[str, Any] = field(default_factory=dict)  # by name, in order
    num_mini_batches: int = 1  # optimizer steps a pass over the rollout batch makes
    num_epochs: int = 1  # passes over it
    mask_truncated: bool = False  # completions cut by the length limit give no gradient


@dataclass
class PromptConfig:
    system: str | None = None
    template: str = "chat"  # or "plain", for base models
    completion_prefix: str = ""
    max_tokens: int = 256
    overlong: str = "filter"  # refuse, filter, truncate


@dataclass
class RolloutConfig:
    engine: Any = MISSING
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    max_logprob_diff: float | None = None  # engine against trainer; null never stops the run


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: str = "constant"  # constant, linear, cosine
    warmup_steps: int = 0  # in optimizer steps


@dataclass
class TrainerConfig:
    precision: str = "float32"  # or bfloat16: compute in bf16, weights and reductions in float32
    micro_batch_tokens: int = 2048  # positions a micro-batch may hold
    layout: str = "shared_prefix"  # or padded
    activation_checkpointing: bool = False


@dataclass
class TrackingConfig:
    uri: str | None = None  # an MLflow tracking URI; null: metrics.jsonl only
    artifacts: str | None = None  # where an embedded store keeps artifacts
    experiment: str = MISSING
    completions_every: int = 10  # steps between tables of completions in MLflow; 0: none
    run_name: str | None = None  # null: the run directory's name
    parent_run_id: str | None = None  # the MLflow run this one is shown under
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class EvaluationConfig:
    every: int = 0  # steps between evaluations; 0: at the end only
    at_start: bool = False
    at_end: bool = True
    max_prompts: int = 64
    num_samples: int = 1
    temperature: float = 0.0  # 0: greedy
    pass_at: list[int] = field(default_factory=lambda: [1])
    correct_function: str | None = None  # the reward function that says what is correct; null: the first
    correct_threshold: float = 1.0  # a completion is correct from this value on


@dataclass
class CheckpointConfig:
    every: int = 10  # steps between checkpoints; 0: only at the end and on a signal
    keep: int | None = 2  # newest ones kept; null: all
    at_end: bool = True


@dataclass
class SweepConfig:
    """Of multirun only: what its jobs are. The jobs' own config.yaml leaves it out."""

    arms: dict[str, list[str]] = field(default_factory=dict)  # name -> overrides; none: the command line's choices
    seeds: list[int] = field(default_factory=list)  # of named arms
    baseline: str | None = None  # the arm the others are compared to; null: the first
    threshold: float | None = None  # mean reward that steps and tokens are counted to; null: half the best arm's end
    fail_fast: bool = False  # start no further job once one has failed


@dataclass
class PluginsConfig:
    allow: list[str] = field(default_factory=list)  # packages outside rlpost whose targets may be imported


@dataclass
class Config:
    name: str = MISSING
    run_dir: str = MISSING
    resume: bool = False
    seed: int = 0
    steps: int = 100
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reducer: Any = MISSING
    reward: Any = MISSING
    model: Any = MISSING
    task: Any = MISSING
    prompt: PromptConfig = field(default_factory=PromptConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: Any = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


ConfigStore.instance().store(name="schema", node=Config)

# Parameters of a target that the program fills in; a config cannot set them.
ENGINE_PARAMETERS = frozenset({"directory", "end_token_ids", "max_model_len", "trust_remote_code"})


def conf_dir() -> Path:
    """The shipped configuration: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    beside = package.parent / "conf"
    return beside if (beside / "train.yaml").is_file() else package / "_conf"


def build(node: DictConfig | Mapping[str, Any], **injected: Any) -> Any:
    """Make the object a `_target_` node describes, from plain arguments.

    Raises: UserError when the target refuses its settings, with the target's own words.
    """
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    try:
        return instantiate(plain, **injected, _convert_="all")
    except UserError:
        raise
    except Exception as error:  # Hydra hides the reason in the cause
        cause = error.__cause__ or error
        if isinstance(cause, ValueError | TypeError):
            raise UserError(f"{plain.get('_target_')}: {cause}") from cause
        raise


def reward_nodes(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The reward group as name -> `_target_` node with a weight. A group that is one target itself gets a name."""
    plain = OmegaConf.to_container(cfg.reward, resolve=True)
    if "_target_" in plain:
        plain = {str(plain["_target_"]).rsplit(".", 1)[-1].lower(): plain}
    return {name: {"weight": 1.0, **node} for name, node in plain.items()}


def target_nodes(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any], frozenset[str]]]:
    """Every plug-in point: its key, its node, and the parameters the program fills in."""
    keys = ["algorithm.advantage", "algorithm.loss", "reducer", "model", "task", "cluster"]
    for key in keys:
        yield key, _plain_node(cfg, key), frozenset()
    if cfg.algorithm.filter is not None:
        yield "algorithm.filter", _plain_node(cfg, "algorithm.filter"), frozenset()
    for group in ("algorithm.corrections", "algorithm.reward_processing"):
        for name in OmegaConf.select(cfg, group):
            yield f"{group}.{name}", _plain_node(cfg, f"{group}.{name}"), frozenset()
    yield "rollout.engine", _plain_node(cfg, "rollout.engine"), ENGINE_PARAMETERS
    for name, node in reward_nodes(cfg).items():
        node = {k: v for k, v in node.items() if k != "weight"}
        yield f"reward.{name}" if "_target_" not in cfg.reward else "reward", node, frozenset()


def _plain_node(cfg: DictConfig, key: str) -> dict[str, Any]:
    node = OmegaConf.select(cfg, key)
    if not isinstance(node, DictConfig):
        raise UserError(f"{key}={node}: expected a group option or a mapping with _target_")
    return OmegaConf.to_container(node, resolve=True)


def validate(cfg: DictConfig) -> None:
    """Everything that can be known to be wrong before anything heavy is imported.

    Raises: UserError, one line that names the key.
    """
    _check_missing(cfg)
    _check_known_keys(cfg, Config, "")
    for key, node, injected in target_nodes(cfg):
        _check_allowed(node, key, cfg)
        check_target(node, key, injected)
    if str(cfg.reducer._target_).endswith(".FunctionReducer"):
        _check_reducer_function(cfg)
    _check_ranges(cfg)
    _check_sizes(cfg)


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
            "trainer.micro_batch_tokens",
        ),
        *("evaluation.num_samples", "evaluation.max_prompts"),
    ]
    for key in at_least_one:
        _require(cfg, key, lambda v: v >= 1, "a whole number, at least 1")
    not_negative = [
        *("algorithm.kl.coef", "algorithm.entropy_coef", "rollout.temperature", "rollout.top_k", "optimizer.lr"),
        *("optimizer.eps", "optimizer.weight_decay", "optimizer.warmup_steps", "evaluation.every", "seed"),
        *("evaluation.temperature", "checkpoint.every", "tracking.completions_every"),
        "algorithm.kl.reference_every",
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
    choices = {
        "algorithm.multi_reward": ["sum_then_normalize", "normalize_then_sum"],
        "algorithm.kl.place": ["loss", "reward"],
        "algorithm.kl.estimator": ["k1", "k2", "k3"],
        "algorithm.kl.reducer": ["sequence_mean", "same"],
        "prompt.template": ["chat", "plain"],
        "prompt.overlong": ["refuse", "filter", "truncate"],
        "optimizer.schedule": ["constant", "linear", "cosine"],
        "trainer.precision": ["float32", "bfloat16"],
        "trainer.layout": ["shared_prefix", "padded"],
    }
    for key, valid in choices.items():
        value = OmegaConf.select(cfg, key)
        if value not in valid:
            raise UserError(f"{key}={value}: {_choice(value, valid)}")
    if "divisor" in cfg.reducer:
        _require(cfg, "reducer.divisor", lambda v: v == "max_tokens" or v > 0, "a number over 0, or max_tokens")
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
    num_processes = cfg.cluster.get("num_processes", 1)
    share = num_processes * cfg.algorithm.num_mini_batches
    if cfg.prompts_per_step % cfg.algorithm.num_mini_batches:
        raise UserError(
            f"prompts_per_step={cfg.prompts_per_step} does not divide into "
            f"algorithm.num_mini_batches={cfg.algorithm.num_mini_batches} equal mini-batches"
        )
    if cfg.prompts_per_step % share:
        raise UserError(
            f"prompts_per_step={cfg.prompts_per_step} does not divide over cluster.num_processes={num_processes} x "
            f"algorithm.num_mini_batches={cfg.algorithm.num_mini_batches}; use a multiple of {share}"
        )
    if cfg.algorithm.max_attempts > 1 and cfg.algorithm.filter is None:
        raise UserError(
            f"algorithm.max_attempts={cfg.algorithm.max_attempts} has nothing to refill: set "
            "algorithm.filter._target_=rlpost.filters.VariedRewards"
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
        if not isinstance(node["weight"], int | float) or not math.isfinite(node["weight"]):
            raise UserError(f"reward.{name}.weight={node['weight']}: expected a finite number")
    _check_context(cfg)


def _check_context(cfg: DictConfig) -> None:
    """Prompt and completion must fit the model's context; where that is not known yet, the worker checks."""
    context = build(cfg.model).context_length()
    needed = cfg.prompt.max_tokens + cfg.rollout.max_tokens
    if context is not None and needed > context:
        raise UserError(
            f"prompt.max_tokens={cfg.prompt.max_tokens} + rollout.max_tokens={cfg.rollout.max_tokens} = {needed} is "
            f"over the model's context of {context} tokens; lower one of them"
        )


def check_task(cfg: DictConfig) -> None:
    """Load the task, so that a wrong file, field or split is answered before anything heavy starts."""
    data = build(cfg.task).load()
    if not data.train:
        raise UserError("task: no prompt is left to train on; hold out fewer, or give held-out rows that differ")


def resolve_paths(cfg: DictConfig) -> None:
    """Make paths absolute, so that workers and a later resume from elsewhere mean the same files."""
    cfg.run_dir = os.path.abspath(cfg.run_dir)
    scheme = "sqlite:///"
    uri = cfg.tracking.uri
    if uri and uri.startswith(scheme):
        cfg.tracking.uri = scheme + os.path.abspath(uri.removeprefix(scheme))
    if cfg.tracking.artifacts and "://" not in cfg.tracking.artifacts:
        cfg.tracking.artifacts = os.path.abspath(cfg.tracking.artifacts)


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


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
