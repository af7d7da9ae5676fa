"""The protocol of rollout engines: token ids in, sampled token ids with their log-probabilities out."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor

from rlpost.config.schema import SamplingConfig
from rlpost.errors import UserError
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.types import Completion, Prompt, Rollout


@dataclass
class Sampling(SamplingConfig):
    """The distribution that completions are drawn from; the settings' meanings stand at `SamplingConfig`. A temperature of
    0 is greedy.

    Attributes: excluded: tokens that are never drawn: those that stand for images.
    """

    excluded: tuple[int, ...] = ()

    @classmethod
    def from_settings(cls, settings: SamplingConfig, excluded: Iterable[int] = ()) -> "Sampling":
        """The sampling of a run, whose settings may have more to them."""
        own = {f.name: getattr(settings, f.name) for f in fields(SamplingConfig)}
        return cls(**own, excluded=tuple(excluded))

    def __post_init__(self) -> None:
        if sum(map(bool, (self.regex, self.json_schema, self.choice))) > 1:
            raise ValueError("regex, json_schema and choice are three ways to guide a completion: set one of them")

    @property
    def is_guided(self) -> bool:
        """True if tokens that would break a pattern, a schema or a choice have probability 0."""
        return bool(self.regex or self.json_schema or self.choice)

    def of(self, prompt: Prompt) -> "Sampling":
        """This sampling with the prompt's own settings."""
        return replace(self, **prompt.sampling) if prompt.sampling else self

    def for_evaluation(self, temperature: float) -> "Sampling":
        """This sampling at the evaluation's temperature."""
        return replace(self, temperature=temperature)

    def distribution(self) -> SamplingDistribution:
        """The distribution that the trainer takes its log-probabilities under."""
        return SamplingDistribution(self.temperature, self.top_p, self.top_k, self.min_p, self.excluded)

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias`, and for excluded tokens one that leaves them no probability (engines take -100 to 100)."""
        return {**self.logit_bias, **dict.fromkeys(self.excluded, -100.0)}

    @property
    def is_plain(self) -> bool:
        """True if tokens come from the softmax of what is not excluded, nothing cut off, penalised, biased or guided."""
        cut = (self.top_p, self.top_k, self.min_p, self.repetition_penalty) != (1.0, 0, 0.0, 1.0)
        return not (cut or self.bad_words or self.logit_bias or self.is_guided)


PER_PROMPT = ("max_tokens", "stop", "bad_words", "logit_bias", "regex", "json_schema", "choice")


def with_own_settings(prompts: Sequence[Prompt], column: str, sampling: Sampling) -> list[Prompt]:
    """Prompts with the sampling settings that a column of their examples holds, as a mapping; None for none.

    Raises: UserError for a setting that is not one of PER_PROMPT (the trainer knows one temperature), or is wrong.
    """
    return [replace(p, sampling=_own_settings(p.example.columns.get(column), column, sampling)) for p in prompts]


def _own_settings(given: Any, column: str, sampling: Sampling) -> dict[str, Any]:
    if given is None:
        return {}
    where = f"rollout.per_prompt={column}"
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: a row has {given!r}; expected a mapping of {', '.join(PER_PROMPT)}")
    own = {name: value for name, value in given.items() if value is not None}  # parquet has every key in every row
    if unknown := sorted(own.keys() - set(PER_PROMPT)):
        raise UserError(f"{where}: a row sets {unknown[0]!r}; expected one of {', '.join(PER_PROMPT)}")
    for name in ("stop", "bad_words", "choice"):
        if name in own:
            own[name] = list(own[name])
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): float(bias) for token, bias in own["logit_bias"].items()}
    if not 1 <= own.get("max_tokens", 1) <= sampling.max_tokens:
        raise UserError(
            f"{where}: a row has max_tokens={own['max_tokens']}; expected 1..{sampling.max_tokens} (rollout.max_tokens)"
        )
    try:
        replace(sampling, **own)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    return own


class Engine(Protocol):
    """Built from (directory, end_token_ids, max_model_len, trust_remote_code) and settings of its own.

    What an engine can do stands in class-level constants, which are read from its source before it is imported.

    - `samples_beside_training = True`: its samples come from other processes, so that it works while the trainer updates.
    - `guides_completions = True`: it samples under `regex`, `json_schema` and `choice`.
    - `ranks_per_replica = "tensor_parallel"`: the name of its setting for the number of consecutive ranks that share one
      engine; without it each rank has its own.
    """

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """One completion for each prompt, as it gets done, with the prompt's index; a prompt may stand there many times.

        A completion depends on its prompt, its seed, the sampling and the weights, and on the other requests
        of the call only through rounding; never on earlier calls.

        Ranks may share an engine, so each calls it as often as the others, with no prompts where it has none, and takes
        all completions.
        """
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over every parameter, and forget whatever was computed with the old ones.

        Args: version: the weights' version, which is the `policy_version` of what they sample; the engine was built with 0.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """The engine's own metrics since it was last asked; their sums over ranks are reported as rollout/<name>."""
        ...

    def close(self) -> None: ...


def check_fits(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int) -> None:
    """Raises: ValueError where a prompt leaves no room for max_tokens; engines would cut the completion unasked."""
    sizes = [(len(prompt.token_ids), sampling.of(prompt).max_tokens) for prompt in prompts]
    longest, room = max(sizes, key=sum, default=(0, 0))
    if longest + room > max_model_len:
        raise ValueError(
            f"a prompt of {longest} and a completion of {room} tokens are over max_model_len={max_model_len}"
        )


def sample_seed(run_seed: int, step: int, group_id: int, sample_index: int) -> int:
    """The seed of one sample, in 0 .. 2^31 - 1: a function of where it stands in the run and nothing else."""
    name = f"{run_seed}/{step}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1


def sample_groups(
    engine: Engine,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    run_seed: int,
    step: int,
    on_group: Callable[[list[Rollout]], None] = lambda group: None,
) -> list[Rollout]:
    """`num_samples` rollouts for each prompt, grouped, each under a seed of its own.

    Args: on_group: is given each group as soon as it is whole, while the others are sampled.
    """
    requests = [(prompt, sample) for prompt in prompts for sample in range(num_samples)]
    seeds = [sample_seed(run_seed, step, prompt.group_id, sample) for prompt, sample in requests]
    rollouts: dict[int, Rollout] = {}
    missing = [num_samples] * len(prompts)
    for index, completion in engine.generate([prompt for prompt, _ in requests], seeds, sampling):
        prompt, sample = requests[index]
        rollouts[index] = Rollout(prompt, completion, sample)
        number = index // num_samples
        missing[number] -= 1
        if not missing[number]:
            on_group([rollouts[i] for i in range(number * num_samples, (number + 1) * num_samples)])
    return [rollouts[index] for index in range(len(requests))]
