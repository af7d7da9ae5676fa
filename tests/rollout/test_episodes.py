"""Several turns as one completion: token-exact, masked, bounded; scripted, and on both real engines."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost.data.prompts import PromptFormat
from rlpost.data.split import user_message
from rlpost.environments.calculator import Calculator
from rlpost.environments.protocol import Reply
from rlpost.errors import UserError
from rlpost.rollout.engine import Engine, Sampling
from rlpost.rollout.episodes import Episodes, ReplyFormat
from rlpost.types import Completion, Example, Prompt, Rollout
from tests.rollout.test_engines import ENGINES, generate, make_engine, trainer_logprobs

END = "<|im_end|>"


class Says:
    """An environment that replies with the next of its texts, and is done when there is none left."""

    stop: Sequence[str] = ()

    def __init__(self, *texts: str, reward: float = 0.0) -> None:
        self._texts, self._reward = texts, reward

    def reset(self, example: Example, seed: int) -> Any:
        left = iter(self._texts)
        reward = self._reward

        class Episode:
            def step(self, completion: str) -> Reply:
                text = next(left, None)
                if text is None:
                    return Reply(reward=reward, done=True)
                return Reply([{"role": "user", "content": text}], reward)

        return Episode()


class Scripted:
    """An engine that answers with the next of its turns, and remembers what it was asked."""

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self._tokenizer, self._turns = tokenizer, list(turns)
        self.asked: list[tuple[int, ...]] = []
        self.calls: list[int] = []  # with so many prompts
        self.limits: list[int] = []
        self.stops: list[tuple[str, ...]] = []

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        self.calls.append(len(prompts))
        for place, prompt in enumerate(prompts):
            own = sampling.of(prompt)
            self.asked.append(prompt.token_ids)
            self.limits.append(own.max_tokens)
            self.stops.append(own.stop)
            text = self._turns.pop(0)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            cut = len(ids) > own.max_tokens
            ids = ids[: own.max_tokens]
            visible = text.removesuffix(END)
            reason = "length" if cut else "stop"
            # As if new weights came before each turn.
            yield place, Completion(tuple(ids), (-0.5,) * len(ids), visible, reason, policy_version=len(self.asked))


@pytest.fixture(scope="module")
def prompt(tiny_tokenizer: Any) -> Prompt:
    return PromptFormat().apply([Example(user_message("3 + 4?"), "7")], tiny_tokenizer, "training")[0]


@pytest.fixture(scope="module")
def reply_format(tiny_tokenizer: Any, tiny_end_tokens: tuple[int, ...]) -> ReplyFormat:
    return ReplyFormat(tiny_tokenizer, tiny_end_tokens)


def play(engine: Any, environment: Any, reply_format: ReplyFormat, prompt: Prompt, **settings: Any) -> Completion:
    max_turns = settings.pop("max_turns", 8)
    episodes = Episodes(engine, environment, reply_format, max_turns)
    ((place, completion),) = episodes.generate([prompt], [1], Sampling(**{"max_tokens": 200, **settings}))
    assert place == 0
    return completion


def test_ids_are_those_of_the_whole_conversation(
    prompt: Prompt, reply_format: ReplyFormat, tiny_tokenizer: Any
) -> None:
    engine = Scripted(tiny_tokenizer, f"I ask.{END}", f"It is 7.{END}")
    completion = play(engine, Says("= 7", reward=0.5), reply_format, prompt)
    conversation = [
        *prompt.example.messages,
        {"role": "assistant", "content": "I ask."},
        {"role": "user", "content": "= 7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    whole = tiny_tokenizer.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
    assert [*prompt.token_ids, *completion.token_ids] == tiny_tokenizer.encode(whole, add_special_tokens=False)
    # The second request is exactly what came before it.
    assert engine.asked[1] == (*prompt.token_ids, *completion.token_ids)[: len(engine.asked[1])]

    first, last = (tiny_tokenizer.encode(t + END, add_special_tokens=False) for t in ("I ask.", "It is 7."))
    replied = len(completion.token_ids) - len(first) - len(last)
    assert completion.sampled_mask == (True,) * len(first) + (False,) * replied + (True,) * len(last)
    assert completion.rollout_logprobs == tuple(-0.5 if sampled else 0.0 for sampled in completion.sampled_mask)
    assert completion.text == "It is 7."  # what the environment said is not the model's answer
    assert completion.policy_version == 1  # the oldest of its turns
    assert completion.messages == tuple(conversation[1:])
    assert completion.environment_reward == 1.0
    assert completion.finish_reason == "stop"


def test_a_turn_without_an_end_token_gets_the_templates_end(
    prompt: Prompt, reply_format: ReplyFormat, tiny_tokenizer: Any
) -> None:
    engine = Scripted(tiny_tokenizer, "<calc>3+4</calc>", f"7{END}")
    completion = play(engine, Says("= 7"), reply_format, prompt)
    text = tiny_tokenizer.decode(completion.token_ids)
    assert text.startswith(f"<calc>3+4</calc>{END}\n")
    assert text.endswith(f"7{END}")


def test_the_completion_prefix_begins_the_first_turn_and_no_other(
    prompt: Prompt, reply_format: ReplyFormat, tiny_tokenizer: Any
) -> None:
    prefixed = replace(prompt, completion_prefix="<calc>", text=prompt.text + "<calc>")
    twice = Scripted(tiny_tokenizer, f"6 * 7</calc>{END}", f"It is 42.{END}")
    completion = play(twice, Calculator(), reply_format, prefixed)
    assert [m["content"] for m in completion.messages] == ["<calc>6 * 7</calc>", "= 42", "It is 42."]
    assert Rollout(prefixed, completion, 0).answer_text == "It is 42."
    once = play(Scripted(tiny_tokenizer, f"42{END}"), Calculator(), reply_format, prefixed)
    assert [m["content"] for m in once.messages] == ["<calc>42"]
    assert Rollout(prefixed, once, 0).answer_text == "<calc>42"


def test_an_environments_stop_strings_end_turns(prompt: Prompt, reply_format: ReplyFormat, tiny_tokenizer: Any) -> None:
    environment = Says()
    environment.stop = ("</calc>",)
    engine = Scripted(tiny_tokenizer, f"7{END}")
    play(engine, environment, reply_format, prompt, stop=("###",))
    assert engine.stops == [("###", "</calc>")]
    own = Scripted(tiny_tokenizer, f"7{END}")
    play(own, environment, reply_format, replace(prompt, sampling={"stop": ("!",)}), stop=("###",))
    assert own.stops == [("!", "</calc>")]  # the row's in place of the run's, and beside the environment's


def test_turns_and_tokens_are_bounded(prompt: Prompt, reply_format: ReplyFormat, tiny_tokenizer: Any) -> None:
    talk = Says(*["more"] * 50)
    completion = play(Scripted(tiny_tokenizer, *[f"a{END}"] * 3), talk, reply_format, prompt, max_turns=3)
    assert (len(completion.messages), completion.finish_reason) == (5, "stop")

    engine = Scripted(tiny_tokenizer, *[f"a{END}"] * 50)
    completion = play(engine, talk, reply_format, prompt, max_tokens=100, max_turns=50)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) <= 100
    assert completion.sampled_mask is not None
    assert completion.sampled_mask[-1]  # no reply without a turn after it
    used = [len(asked) - len(prompt.token_ids) for asked in engine.asked]
    assert engine.limits == [100 - count for count in used]

    completion = play(Scripted(tiny_tokenizer, f"abcdefgh{END}"), talk, reply_format, prompt, max_tokens=4)
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")


def test_an_engine_is_asked_equally_often_however_soon_episodes_end(
    prompt: Prompt, reply_format: ReplyFormat, tiny_tokenizer: Any
) -> None:
    engine = Scripted(tiny_tokenizer, *[f"a{END}"] * 2)
    play(engine, Says("b"), reply_format, prompt, max_turns=4)
    assert engine.calls == [1, 1, 0, 0]  # other ranks may share it


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_tokenizer: Any, tiny_end_tokens: Any) -> None:
    class LastTurnOnly:
        def decode(self, ids: Sequence[int]) -> str:
            return tiny_tokenizer.decode(ids)

        def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> str:
            return f"{len(messages)}: {messages[-1]['content']}{END}"

    reply_format = ReplyFormat(LastTurnOnly(), tiny_end_tokens)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        reply_format.token_ids([{"role": "user", "content": "x"}], tiny_end_tokens[0])


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_dir: Path, tiny_end_tokens: tuple[int, ...]) -> Iterator[Engine]:
    engine = make_engine(request.param, tiny_dir, tiny_end_tokens)
    yield engine
    engine.close()


def test_an_episode_of_one_turn_is_the_plain_completion(
    engine: Engine, prompt: Prompt, reply_format: ReplyFormat
) -> None:
    sampling = Sampling(max_tokens=20)
    plain = generate(engine, [prompt] * 4, range(4), sampling)
    episodes = generate(Episodes(engine, Says(), reply_format, 8), [prompt] * 4, range(4), sampling)
    for one, other in zip(plain, episodes, strict=True):
        assert (one.token_ids, one.rollout_logprobs, one.text) == (other.token_ids, other.rollout_logprobs, other.text)
        assert other.sampled_mask == (True,) * len(one.token_ids)


def test_sampled_logprobs_are_the_trainers_in_every_turn(
    engine: Engine, prompt: Prompt, reply_format: ReplyFormat, tiny_dir: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    episodes = Episodes(engine, Says("go on", "and?"), reply_format, 8)
    completions = generate(episodes, [prompt] * 16, range(16), Sampling(max_tokens=120, stop=tuple("aeiou12345")))
    turns = [sum(message["role"] == "assistant" for message in c.messages) for c in completions]
    assert max(turns) == 3
    for completion in completions:
        mask = torch.tensor(completion.sampled_mask)
        expected = trainer_logprobs(model, prompt, completion, 1.0)
        torch.testing.assert_close(torch.tensor(completion.rollout_logprobs)[mask], expected[mask], rtol=0, atol=1e-4)
    again = generate(episodes, [prompt] * 16, range(16), Sampling(max_tokens=120, stop=tuple("aeiou12345")))
    assert again == completions
