"""Every setting that rlpost owns, declared once: its type, its default, the values it may have and its meaning.

The classes that take settings take these dataclasses, so nothing here imports more than the standard library. A field of
type `Node` is a plug-in point: a mapping with a `_target_`, whose other keys are the target's own settings; {} is none.
docs/settings.md is generated from this file (`make docs`).
"""

from dataclasses import dataclass
from typing import Any

from rlpost.config.ranges import Above, AtLeast, Finite, OneOf, Within, section, setting

MISSING: Any = "???"  # OmegaConf's mark of a value that has to be given
Node = dict[str, Any]


@dataclass
class KLConfig:
    """The divergence from a reference model: whether one is needed, and where it counts."""

    coef: float = setting(
        0.0, "Weight of the KL term; over 0 it loads a reference model, the initial policy.", AtLeast(0)
    )
    measure: bool = setting(False, "Load the reference to report policy/kl_ref, whatever the coefficient.")
    place: str = setting(
        "loss",
        "Where the KL counts: in the loss, or as the sequence's k1 estimate taken off its reward.",
        OneOf("loss", "reward"),
    )
    estimator: str = setting(
        "k3", "The estimate of the KL in the loss (http://joschu.net/blog/kl-approx.html).", OneOf("k1", "k2", "k3")
    )
    unbiased: bool = setting(
        False,
        "Multiply the estimate in the loss by the ratio pi / pi_old, which makes its gradient the KL's own "
        "(arXiv:2512.02556).",
    )
    reference_every: int = setting(
        0, "Steps between moves of the reference towards the policy (arXiv:2404.09656); 0: it stays.", AtLeast(0)
    )
    reference_mix: float = setting(1.0, "The share of the way that the reference moves; 1 is all of it.", Above(0, 1))
    reducer: str = setting(
        "sequence_mean",
        "How the KL in the loss is weighed: by the sequence mean, or the same as the policy gradient.",
        OneOf("sequence_mean", "same"),
    )

    @property
    def loss_coef(self) -> float:
        """The KL's weight in the loss."""
        return self.coef if self.place == "loss" else 0.0

    @property
    def reward_coef(self) -> float:
        """The weight of what is taken off rewards."""
        return self.coef if self.place == "reward" else 0.0

    @property
    def needs_reference(self) -> bool:
        return self.coef > 0 or self.measure

    @property
    def moves_reference(self) -> bool:
        """True if the reference has weights of its own that change, so that a checkpoint must hold them."""
        return self.needs_reference and self.reference_every > 0


@dataclass
class AlgorithmConfig:
    """The way from a step's rollouts to an update."""

    advantage: Node = setting({}, "The advantage of every rollout.")
    loss: Node = setting({}, "The loss of a token.")
    multi_reward: str = setting(
        "sum_then_normalize",
        "Advantages of the summed reward, or the weighted sum of each function's own advantages, normalised over the step "
        "(GDPO, arXiv:2601.05242).",
        OneOf("sum_then_normalize", "normalize_then_sum"),
    )
    corrections: dict[str, Any] = setting(
        {}, "Corrections for the engine's probabilities, by name; each reports objective/<name>_cut."
    )
    kl: KLConfig = section(KLConfig)
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", AtLeast(0))
    top_entropy_share: float | None = setting(
        None,
        "The share of the step's tokens, those of the highest entropy, that give a policy gradient (arXiv:2506.01939); "
        "null: all.",
        Above(0, 1),
    )
    max_log_ratio: float | None = setting(
        20.0,
        "Bound on the size of a log-ratio of probabilities before it is exponentiated, in losses and in k3; beyond it the "
        "ratio is constant and gives no gradient. null: what the precision can hold.",
        Above(0),
    )
    filter: Node | None = setting({}, "A filter of groups; null keeps every group.")
    max_attempts: int = setting(1, "Rounds of sampling to fill a step whose groups the filter leaves out.", AtLeast(1))
    reward_processing: dict[str, Any] = setting({}, "Changes to summed rewards, by name, in order.")
    num_mini_batches: int = setting(1, "Optimizer steps that a pass over the rollout batch makes.", AtLeast(1))
    num_epochs: int = setting(1, "Passes over the rollout batch.", AtLeast(1))
    mask_truncated: bool = setting(False, "Completions cut by the length limit give no gradient.")


@dataclass
class PromptConfig:
    """The form in which a prompt is written for the model."""

    system: str | None = setting(None, "A system message put before the example's messages; an example's own wins.")
    template: str = setting(
        "chat",
        "The tokenizer's chat template, or the messages' contents joined with blank lines, for base models.",
        OneOf("chat", "plain"),
    )
    completion_prefix: str = setting("", "Text the answer starts with: rewards see it, and it is not trained on.")
    max_tokens: int = setting(256, "The longest prompt, in tokens.", AtLeast(1))
    overlong: str = setting(
        "filter",
        "A longer prompt stops the run, is left out, or has its beginning cut off.",
        OneOf("refuse", "filter", "truncate"),
    )
    tools: str | None = setting(
        None, "A column of the task with the tools that a prompt describes, as JSON schemas or text of them."
    )


@dataclass
class StreamConfig:
    """The order of the prompts."""

    curriculum: str | None = setting(
        None, "A column of the task: the first pass takes prompts in the order in which it rises."
    )


@dataclass
class SamplingConfig:
    """The distribution that completions are drawn from.

    Nothing is taken from the model's generation_config but its end tokens.
    """

    max_tokens: int = setting(32, "The longest completion, in tokens, its end token counted.", AtLeast(1))
    temperature: float = setting(
        1.0, "The logits are divided by it; over 0, for greedy completions are all alike.", AtLeast(0)
    )
    top_p: float = setting(1.0, "The probability that the most likely tokens, which are kept, add up to.", Above(0, 1))
    top_k: int = setting(0, "The number of most likely tokens that are kept; 0: all.", AtLeast(0))
    min_p: float = setting(0.0, "The least probability of a token, as a share of the most likely one's.", Within(0, 1))
    repetition_penalty: float = setting(
        1.0, "Logits of tokens that have occurred are divided by it (multiplied, where they are negative).", Above(0)
    )
    stop: list[str] = setting([], "Texts that end a completion once it contains one.")
    bad_words: list[str] = setting([], "Texts that are never written.")
    logit_bias: dict[int, float] = setting({}, "Additions to logits, by token id.")
    regex: str | None = setting(None, "A regular expression that completions match; at most one of these three is set.")
    json_schema: str | None = setting(None, "A JSON schema, as text, under which completions are valid.")
    choice: list[str] = setting([], "The texts that a completion is one of.")


@dataclass
class RolloutConfig(SamplingConfig):
    """The sampling of rollouts, and the engine that does it."""

    engine: Node = setting({}, "The engine that samples.")
    per_prompt: str | None = setting(
        None, "A column of the task with a prompt's own max_tokens, stop, bad_words, logit_bias or guide."
    )
    max_turns: int = setting(8, "The most turns of an episode, with an environment.", AtLeast(1))
    max_logprob_diff: float | None = setting(
        0.01,
        "The largest difference of a token's log-probability between engine and trainer; a larger one stops the run, null "
        "never does. In fp32 about 1e-4 is seen; bf16 needs null or about 1.",
        Above(0),
    )
    staleness: int = setting(0, "Steps that sampling runs ahead of the update; 0 is strictly on-policy.", AtLeast(0))


@dataclass
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685) in place of training every weight."""

    rank: int = setting(0, "Rank of the adapters; 0 trains every weight.", AtLeast(0))
    alpha: float = setting(32.0, "The adapters' product counts alpha / rank times.", Above(0))
    targets: list[str] = setting(
        [], "The linear layers that get adapters, by the ends of their names; none named: all but the head."
    )


@dataclass
class TrainerConfig:
    """The computation of the update, and its spread over ranks."""

    precision: str = setting(
        "float32",
        "The precision of the model's computation; weights and reductions are float32 in either.",
        OneOf("float32", "bfloat16"),
    )
    micro_batch_tokens: int = setting(2048, "Positions that a micro-batch may hold, padding counted.", AtLeast(1))
    layout: str = setting(
        "shared_prefix",
        "A group's completions behind one copy of their prompt, or a padded row for each.",
        OneOf("shared_prefix", "padded"),
    )
    activation_checkpointing: bool = setting(
        False, "Compute activations again in the backward pass in place of keeping them."
    )
    context_parallel: int = setting(1, "Consecutive ranks that share each row's positions.", AtLeast(1))
    replicas: int = setting(1, "Copies of the sharded weights, each over ranks / replicas ranks.", AtLeast(1))
    lora: LoRAConfig = section(LoRAConfig)
    cpu_offload: bool = setting(False, "Keep weights, gradients and optimizer states in the host's memory.")


@dataclass
class TrackingConfig:
    """The records beside the run directory's own files."""

    uri: str | None = setting(None, "An MLflow tracking URI; null: the run directory only.")
    artifacts: str | None = setting(None, "The directory in which an embedded store keeps artifacts.")
    experiment: str = setting(MISSING, "The MLflow experiment.")
    completions_every: int = setting(10, "Steps between tables of completions in MLflow; 0 logs none.", AtLeast(0))
    traces: int = setting(
        4, "Rollouts of such a step that are shown as traces, with their rewards as assessments.", AtLeast(0)
    )
    run_name: str | None = setting(None, "The MLflow run's name; null: the run directory's.")
    parent_run_id: str | None = setting(None, "The MLflow run that this one is shown under.")
    tags: dict[str, str] = setting({}, "Further tags of the MLflow run.")


@dataclass
class EvaluationConfig:
    """When held-out prompts are evaluated, and how."""

    every: int = setting(0, "Steps between evaluations; 0 evaluates at the ends only.", AtLeast(0))
    at_start: bool = setting(False, "Evaluate the initial model.")
    at_end: bool = setting(True, "Evaluate after the last step.")
    max_prompts: int = setting(64, "Held-out prompts that are evaluated, the first ones.", AtLeast(1))
    num_samples: int = setting(1, "Completions of each prompt.", AtLeast(1))
    temperature: float = setting(0.0, "The temperature of these completions; 0 is greedy.", AtLeast(0))
    pass_at: list[int] = setting([1], "The k of each pass@k that is reported (arXiv:2107.03374).")
    correct_function: str | None = setting(None, "The reward function that says what is correct; null: the first one.")
    correct_threshold: float = setting(1.0, "The value from which on a completion is correct.", Finite())


@dataclass
class ScoringConfig:
    """The processes beside the trainer that run reward functions and end what hangs or crashes."""

    processes: int = setting(1, "Processes of each rank.", AtLeast(1))
    timeout: float = setting(10.0, "Seconds that a completion may take.", Above(0))
    on_error: str = setting(
        "fail",
        "A function that fails on a completion ends the run, or counts as 0, or does not count.",
        OneOf("fail", "zero", "none"),
    )


@dataclass
class RewardConfig:
    """A reward function's node: its target, and these settings beside the function's own."""

    target: Node
    weight: float = setting(1.0, "The function's weight in the reward.", Finite())
    tasks: list[str] | None = setting(None, "The tasks of a mixture that the function applies to; null: all.")
    runs_in: str = setting(
        "processes",
        "In processes beside the trainer, or in the trainer itself, once sampling is over.",
        OneOf("processes", "trainer"),
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and which are kept."""

    every: int = setting(10, "Steps between checkpoints; 0 writes them at the end and on a signal only.", AtLeast(0))
    keep: int | None = setting(2, "The newest checkpoints that are kept; null: all.", AtLeast(1))
    at_end: bool = setting(True, "Write a checkpoint after the last step.")


@dataclass
class SweepConfig:
    """The jobs of a multirun. Their own config.yaml leaves this section out."""

    arms: dict[str, list[str]] = setting({}, "Overrides by the arm's name; none: the command line's choices.")
    seeds: list[int] = setting([], "The seeds that every named arm runs under.")
    baseline: str | None = setting(None, "The arm that the others are compared to; null: the first.")
    threshold: float | None = setting(
        None, "The mean reward that steps and tokens are counted to; null: half of the best arm's at the end."
    )
    fail_fast: bool = setting(False, "Start no further job once one has failed.")


@dataclass
class PluginsConfig:
    """The code that a configuration may import."""

    allow: list[str] = setting([], "Packages outside rlpost whose targets may be imported.")


@dataclass
class StepConfig:
    """The number of a run's steps, and how much is sampled for each."""

    seed: int = setting(0, "The seed of everything that is drawn.", AtLeast(0))
    steps: int = setting(25, "Training steps of the run.", AtLeast(1))
    prompts_per_step: int = setting(8, "Prompts of a step, over all ranks.", AtLeast(1))
    samples_per_prompt: int = setting(8, "Completions of each prompt: a group.", AtLeast(1))


@dataclass
class Config(StepConfig):
    """An experiment."""

    name: str = setting(MISSING, "The experiment's name.")
    run_dir: str = setting(MISSING, "The directory of the run's files.")
    resume: bool = setting(False, "Go on with the run in run_dir, from its newest checkpoint.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    reducer: Node = setting({}, "The weights of the tokens' losses in the step's loss.")
    reward: Node = setting({}, "The reward functions, by name.")
    model: Node = setting({}, "The source of the model's directory.")
    task: Node = setting({}, "The prompts and their answers.")
    prompt: PromptConfig = section(PromptConfig)
    stream: StreamConfig = section(StreamConfig)
    environment: Node | None = setting({}, "Whoever answers between turns; null: a completion is one turn.")
    rollout: RolloutConfig = section(RolloutConfig)
    optimizer: Node = setting({}, "The optimizer and its learning rate over the run.")
    trainer: TrainerConfig = section(TrainerConfig)
    cluster: Node = setting({}, "Where the processes run.")
    tracking: TrackingConfig = section(TrackingConfig)
    metrics: dict[str, Any] = setting(
        {}, "Further metrics by name: the import path of a function of a step's rollouts, or a node."
    )
    evaluation: EvaluationConfig = section(EvaluationConfig)
    scoring: ScoringConfig = section(ScoringConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    plugins: PluginsConfig = section(PluginsConfig)
    sweep: SweepConfig = section(SweepConfig)
