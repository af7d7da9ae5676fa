"""What a rollout engine is: token ids in, sampled token ids with their log-probabilities out."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlpost.types import Completion, Prompt, Rollout


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Everything is explicit: the model's generation_config gives end tokens only.

    Attributes:
        temperature: 0 is greedy. top_p, top_k (0: off), min_p, repetition_penalty as in vLLM and transformers.
        stop: strings that end a completion once it contains one.
        max_tokens: the longest completion, its end token counted.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether tokens come from softmax(logits / temperature), nothing cut off and nothing penalised."""
        return (self.top_p, self.top_k, self.min_p, self.repetition_penalty) == (1.0, 0, 0.0, 1.0)


class Engine(Protocol):
    """Built from (directory, end_token_ids, max_model_len, trust_remote_code) and settings of its own."""

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """One completion for each prompt, as it gets done, with the prompt's index; a prompt may stand there many times.

        A completion depends on its prompt, its seed, the sampling and the weights, and on the other requests
        of the call only through rounding; never on earlier calls.
        """
        ...

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over every parameter, and forget whatever was computed with the old ones."""
        ...

    def close(self) -> None: ...


def check_fits(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int) -> None:
    """Raises: ValueError where a prompt leaves no room for max_tokens; engines would cut the completion unasked."""
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if longest + sampling.max_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {longest} and a completion of {sampling.max_tokens} tokens are over "
            f"max_model_len={max_model_len}"
        )


def sample_seed(run_seed: int, step: int, group_id: int, sample_index: int) -> int:
    """The seed of one sample, in 0 .. 2^31 - 1: a function of its place in the run and nothing else."""
    place = f"{run_seed}/{step}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=4).digest(), "big") >> 1


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
    places = [(prompt, index) for prompt in prompts for index in range(num_samples)]
    seeds = [sample_seed(run_seed, step, prompt.group_id, index) for prompt, index in places]
    rollouts: dict[int, Rollout] = {}
    missing = [num_samples] * len(prompts)
    for place, completion in engine.generate([prompt for prompt, _ in places], seeds, sampling):
        prompt, index = places[place]
        rollouts[place] = Rollout(prompt, completion, index)
        number = place // num_samples
        missing[number] -= 1
        if not missing[number]:
            on_group([rollouts[i] for i in range(number * num_samples, (number + 1) * num_samples)])
    return [rollouts[place] for place in range(len(places))]
