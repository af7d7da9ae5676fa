"""Several turns as one completion: an engine around an engine, with an environment that replies in between.

Token in, token out, over turns too: a turn continues exactly the ids that were sampled before, and a reply's ids are appended
once. The reply is part of the completion and masked out of the loss.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rlpost.data.vision import Vision
from rlpost.environments.protocol import Environment, Episode
from rlpost.errors import UserError
from rlpost.rollout.engine import Engine, Sampling
from rlpost.types import Completion, Prompt


class ReplyFormat:
    """The form of replies between two turns of the model, from the chat template.

    Args: template: a tokenizer, or a `Vision`.

    Raises: UserError if the template rewrites earlier turns, so that there is no such place.
    """

    def __init__(self, template: Any, end_token_ids: Sequence[int]) -> None:
        self._template = template
        self._tokenizer = tokenizer = template.tokenizer if isinstance(template, Vision) else template
        self._end_tokens = {token: tokenizer.decode([token]) for token in end_token_ids}

    def token_ids(self, messages: Sequence[Mapping[str, str]], last_token: int) -> list[int]:
        """Ids that lead from a turn to the next one.

        Args: last_token: the turn's last token; where it is no end token (a stop string came), the template's own end is added.
        """
        turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ANSWER"}]
        before = self._render(turn, False)
        after = self._render([*turn, *map(dict, messages)], True)
        end = before.rpartition("ANSWER")[2]
        if not after.startswith(before) or not before.count("ANSWER") == 1:
            raise UserError("the model's chat template rewrites earlier turns, which an environment cannot work with")
        if last_token in self._end_tokens:
            end = end.partition(self._end_tokens[last_token])[2]
        return self._tokenizer.encode(end + after[len(before) :], add_special_tokens=False)

    def _render(self, messages: Sequence[Mapping[str, str]], generate: bool) -> str:
        return self._template.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


@dataclass
class _Running:
    """An episode under way."""

    episode: Episode
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    messages: list[Mapping[str, str]] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    versions: list[int] = field(default_factory=list)

    def add_turn(self, turn: Completion, text: str) -> None:
        self.token_ids += turn.token_ids
        self.logprobs += turn.rollout_logprobs
        self.sampled += [True] * len(turn.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.versions.append(turn.policy_version)

    def add_reply(self, messages: Sequence[Mapping[str, str]], token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.sampled += [False] * len(token_ids)
        self.messages += messages

    def completion(self, last: Completion) -> Completion:
        """`text` is the last turn's: what an environment said is not the model's answer."""
        return replace(
            last,
            token_ids=tuple(self.token_ids),
            rollout_logprobs=tuple(self.logprobs),
            sampled_mask=tuple(self.sampled),
            messages=tuple(self.messages),
            environment_reward=self.reward,
            policy_version=min(self.versions),
        )


class Episodes:
    """An engine whose completions are whole episodes of at most `max_tokens` tokens, replies counted.

    An episode ends when the environment says so, after `max_turns` turns, where a turn is cut by the limit, and where a reply
    leaves no room for another one.
    """

    def __init__(self, engine: Engine, environment: Environment, reply_format: ReplyFormat, max_turns: int) -> None:
        self._engine = engine
        self._environment = environment
        self._reply_format = reply_format
        self._max_turns = max_turns

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        sampling = replace(sampling, stop=(*sampling.stop, *self._environment.stop))
        limits = [sampling.of(prompt).max_tokens for prompt in prompts]
        running = {
            index: _Running(self._environment.reset(prompt.example, seed))
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        }
        for _ in range(self._max_turns):  # on every rank, whether or not it still has an episode
            indices = list(running)
            continued = [self._continued(prompts[p], running[p], limits[p]) for p in indices]
            turn_seeds = [_turn_seed(seeds[p], running[p].turns) for p in indices]
            for number, turn in self._engine.generate(continued, turn_seeds, sampling):
                index = indices[number]
                if (whole := self._after(running[index], turn, prompts[index], limits[index])) is not None:
                    del running[index]
                    yield index, whole

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._engine.load_weights(named_weights, version)

    def metrics(self) -> dict[str, float]:
        return self._engine.metrics()

    def close(self) -> None:
        self._engine.close()

    def _continued(self, prompt: Prompt, episode: _Running, limit: int) -> Prompt:
        own = {**prompt.sampling, "max_tokens": limit - len(episode.token_ids)}
        if "stop" in own:  # in place of the run's strings, and beside the environment's
            own["stop"] = (*own["stop"], *self._environment.stop)
        return replace(
            prompt,
            token_ids=(*prompt.token_ids, *episode.token_ids),
            unexpanded_ids=(*prompt.unexpanded_ids, *episode.token_ids),
            sampling=own,
        )

    def _after(self, running: _Running, turn: Completion, prompt: Prompt, limit: int) -> Completion | None:
        """The whole completion if the episode is over with this turn; None if it goes on."""
        text = turn.text if running.turns else prompt.completion_prefix + turn.text
        running.add_turn(turn, text)
        if turn.finish_reason == "length":
            return running.completion(turn)
        reply = running.episode.step(text)
        running.reward += reply.reward
        if reply.done or running.turns >= self._max_turns:
            return running.completion(turn)
        token_ids = self._reply_format.token_ids(reply.messages, turn.token_ids[-1])
        if len(running.token_ids) + len(token_ids) >= limit:
            return running.completion(replace(turn, finish_reason="length"))
        running.add_reply(reply.messages, token_ids)
        return None


def _turn_seed(seed: int, turn: int) -> int:
    """The sample's own for the first turn, so that an episode of one turn is the plain completion."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=4).digest(), "big") >> 1
