"""The configuration's schema: every setting that rlpost owns, its type and its default. Imports no torch.

Fields typed Any hold a `_target_` node: a plug-in point, whose keywords `targets.py` checks.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


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
    tools: str | None = None  # a column of the task with the tools that a prompt describes, as JSON schemas


@dataclass
class StreamConfig:
    curriculum: str | None = None  # a column of the task: the first pass takes prompts as it rises


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
    bad_words: list[str] = field(default_factory=list)  # texts that are never written
    logit_bias: dict[int, float] = field(default_factory=dict)  # by token id
    regex: str | None = None  # what completions must match; or
    json_schema: str | None = None  # be valid under, as JSON text; or
    choice: list[str] = field(default_factory=list)  # be one of
    per_prompt: str | None = None  # a column of the task with a prompt's own settings of these, and max_tokens
    max_turns: int = 8  # of an episode, with an environment
    max_logprob_diff: float | None = None  # engine against trainer; null never stops the run
    staleness: int = 0  # steps that sampling runs ahead of the update; 0: strictly on-policy


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
class LoRAConfig:
    rank: int = 0  # of the adapters; 0: every weight is trained
    alpha: float = 32.0  # they count alpha / rank times
    targets: list[str] = field(default_factory=list)  # linear layers by the end of their names; none: all but the head


@dataclass
class TrainerConfig:
    precision: str = "float32"  # or bfloat16: compute in bf16, weights and reductions in float32
    micro_batch_tokens: int = 2048  # positions a micro-batch may hold
    layout: str = "shared_prefix"  # or padded
    activation_checkpointing: bool = False
    context_parallel: int = 1  # ranks that share each row's positions: consecutive ones
    replicas: int = 1  # of the sharded weights: each over ranks / replicas
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    cpu_offload: bool = False  # weights, gradients and optimizer states in the host's memory


@dataclass
class TrackingConfig:
    uri: str | None = None  # an MLflow tracking URI; null: metrics.jsonl only
    artifacts: str | None = None  # where an embedded store keeps artifacts
    experiment: str = MISSING
    completions_every: int = 10  # steps between tables of completions in MLflow; 0: none
    traces: int = 4  # rollouts of such a step that are shown as traces, their rewards as assessments
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
class ScoringConfig:
    """Reward functions run beside the trainer, in processes that end what hangs or crashes (rlpost/rewards/processes.py)."""

    processes: int = 1  # of each rank
    timeout: float = 10.0  # seconds a completion may take
    on_error: str = "fail"  # a function that fails on a completion: fail ends the run; zero, none go on


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
    stream: StreamConfig = field(default_factory=StreamConfig)
    environment: Any = None  # who answers between turns; null: a completion is one turn
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: Any = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


ConfigStore.instance().store(name="schema", node=Config)
