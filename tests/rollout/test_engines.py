"""All engines, for real, on the tiny model: what they sample, what they say of it, and new weights."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost.data.prompts import PromptFormat
from rlpost.data.split import user_message
from rlpost.errors import UserError
from rlpost.models.sources import end_token_ids, load_tokenizer
from rlpost.models.tiny import TinyLlama
from rlpost.objective.logprobs import SamplingDistribution, token_logprobs
from rlpost.rollout.engine import Engine, Sampling, sample_groups, sample_seed, with_own_settings
from rlpost.types import Completion, Example, Prompt, Rollout

ENGINES = ["vllm", "transformers", "paged"]


def make_engine(kind: str, directory: Path, end_tokens: tuple[int, ...]) -> Engine:
    if kind == "vllm":
        from rlpost.rollout.vllm import VLLMEngine

        return VLLMEngine(directory, end_tokens, max_model_len=256, kv_cache_bytes=2**26)
    if kind == "paged":
        from rlpost.rollout.paged import PagedTransformersEngine

        return PagedTransformersEngine(directory, end_tokens, max_model_len=256, max_num_seqs=5)
    from rlpost.rollout.transformers import TransformersEngine

    return TransformersEngine(directory, end_tokens, max_model_len=256, batch_size=5)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_dir: Path, tiny_end_tokens: tuple[int, ...]) -> Iterator[Engine]:
    engine = make_engine(request.param, tiny_dir, tiny_end_tokens)
    yield engine
    engine.close()


def generate(engine: Engine, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
    """One completion for each prompt, in order."""
    done = dict(engine.generate(prompts, seeds, sampling))
    assert sorted(done) == list(range(len(prompts)))
    return [done[place] for place in range(len(prompts))]


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[Prompt]:
    texts = ["hi", "What is 3 + 4?", "a much longer question, " * 4, "hi"]
    return PromptFormat().apply([Example(user_message(t), None) for t in texts], tiny_tokenizer, "training")


def trainer_logprobs(model: Any, prompt: Prompt, completion: Completion, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)


@pytest.fixture
def reference(tiny_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)


def knows(engine: Engine, sampling: Sampling, prompts: Sequence[Prompt]) -> bool:
    """Whether the engine can sample like this; one that cannot has to say so."""
    lacks = ("Paged",) if not sampling.is_guided else ("Paged", "Transformers")
    if not type(engine).__name__.startswith(lacks):
        return True
    with pytest.raises(UserError, match=r"does not guide completions|rollout=paged knows neither"):
        generate(engine, prompts, range(len(prompts)), sampling)
    return False


def restore(engine: Engine, model: Any, version: int = 0) -> None:
    engine.load_weights(((n, p.detach()) for n, p in model.named_parameters()), version)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(
    engine: Engine, prompts: list[Prompt], reference: Any, temperature: float
) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature)
    for prompt, completion in zip(prompts, generate(engine, prompts, [1, 2, 3, 4], sampling), strict=True):
        expected = trainer_logprobs(reference, prompt, completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.rollout_logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "cuts", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.3}, {"min_p": 0.05, "top_k": 40, "top_p": 0.7}]
)
def test_cut_logprobs_equal_the_trainers_on_the_same_support(
    engine: Engine, prompts: list[Prompt], reference: Any, cuts: dict[str, float]
) -> None:
    distribution = SamplingDistribution(0.9, **cuts)
    sampling = Sampling(max_tokens=12, temperature=0.9, **cuts)
    for prompt, completion in zip(prompts, generate(engine, prompts, [1, 2, 3, 4], sampling), strict=True):
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        with torch.no_grad():
            hidden = reference.model(ids).last_hidden_state[0, len(prompt.token_ids) - 1 : -1]
            expected, _ = token_logprobs(
                hidden, reference.lm_head.weight, torch.tensor(completion.token_ids), distribution
            )
        torch.testing.assert_close(torch.tensor(completion.rollout_logprobs), expected, rtol=0, atol=1e-4)


def test_an_eager_engine_compiles_nothing(
    tiny_dir: Path, tiny_end_tokens: tuple[int, ...], prompts: list[Prompt]
) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    engine = make_engine("vllm", tiny_dir, tiny_end_tokens)
    try:
        assert generate(engine, prompts, [1, 2, 3, 4], Sampling(max_tokens=3))
        assert not counters["frames"]
    finally:
        engine.close()


def test_a_seed_repeats_whatever_came_before(engine: Engine, prompts: list[Prompt]) -> None:
    sampling = Sampling(max_tokens=12)
    first = generate(engine, prompts, [1, 2, 3, 4], sampling)
    generate(engine, prompts[:2], [9, 9], Sampling(max_tokens=30, temperature=0.3))
    assert generate(engine, prompts, [1, 2, 3, 4], sampling) == first
    assert first[0].token_ids != first[3].token_ids  # the same prompt under another seed
    assert generate(engine, prompts, [5, 2, 3, 4], sampling)[0] != first[0]


def test_end_tokens_end_and_are_kept(engine: Engine, prompts: list[Prompt], tiny_end_tokens: tuple[int, ...]) -> None:
    completions = generate(engine, prompts * 16, range(64), Sampling(max_tokens=60))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        ends = [token in tiny_end_tokens for token in completion.token_ids]
        assert len(completion.token_ids) == len(completion.rollout_logprobs)
        assert not any(ends[:-1])
        assert ends[-1] == (completion.finish_reason == "stop")
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 60


def test_stop_strings(engine: Engine, prompts: list[Prompt], tiny_tokenizer: Any) -> None:
    stops = tuple("abcdefghij")
    num_checked = 0
    for completion in generate(engine, prompts * 8, range(32), Sampling(max_tokens=60, stop=stops)):
        text = tiny_tokenizer.decode(completion.token_ids)
        # A random model writes broken UTF-8, which the engines hold back while they wait for its end.
        if completion.finish_reason == "stop" and not text.endswith("<|im_end|>") and "\ufffd" not in text:
            assert any(s in text for s in stops)
            before = tiny_tokenizer.decode(completion.token_ids[:-1])
            assert not any(s in before for s in stops)
            num_checked += 1
    assert num_checked


def test_top_k_of_one_is_greedy(engine: Engine, prompts: list[Prompt]) -> None:
    greedy = generate(engine, prompts, [0] * 4, Sampling(max_tokens=8, temperature=0))
    assert greedy[0].token_ids == greedy[3].token_ids
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        cut = generate(engine, prompts, [7] * 4, Sampling(max_tokens=8, **settings))
        assert [c.token_ids for c in cut] == [c.token_ids for c in greedy], settings
        assert all(p == pytest.approx(0, abs=1e-5) for c in cut for p in c.rollout_logprobs)


def test_a_repetition_penalty_changes_the_choice(engine: Engine, prompts: list[Prompt]) -> None:
    plain = generate(engine, prompts, [0] * 4, Sampling(max_tokens=40, temperature=0))
    sampling = Sampling(max_tokens=40, temperature=0, repetition_penalty=5.0)
    if not knows(engine, sampling, prompts):
        return
    penalised = generate(engine, prompts, [0] * 4, sampling)
    assert [c.token_ids for c in plain] != [c.token_ids for c in penalised]


def test_new_weights_reach_every_parameter_tied_ones_too(engine: Engine, prompts: list[Prompt], reference: Any) -> None:
    for version in (4, 5):
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        restore(engine, reference, version)
        completions = generate(engine, prompts, [1, 2, 3, 4], Sampling(max_tokens=12))
        assert {completion.policy_version for completion in completions} == {version}
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = trainer_logprobs(reference, prompt, completion, 1.0)
            torch.testing.assert_close(torch.tensor(completion.rollout_logprobs), expected, rtol=0, atol=1e-4)


def test_an_untied_model_too(tmp_path: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlpost.rollout.transformers import TransformersEngine

    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path))
    directory = TinyLlama(tied=False).directory()
    engine = TransformersEngine(directory, end_token_ids(directory, load_tokenizer(directory)), 64)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    weights = [(n, p + 0.1) for n, p in model.named_parameters()]
    engine.load_weights(weights, 1)
    with pytest.raises(RuntimeError, match="no weights for"):
        engine.load_weights(weights[:-1], 2)


def test_engines_answer_greedily_alike_before_and_after_updates(
    tiny_dir: Path, tiny_end_tokens: tuple[int, ...], prompts: list[Prompt], reference: Any
) -> None:
    engines = [make_engine(kind, tiny_dir, tiny_end_tokens) for kind in ENGINES]
    sampling = Sampling(max_tokens=24, temperature=0)
    seen = set()
    try:
        for _ in range(4):
            first, *others = (generate(engine, prompts, [0] * 4, sampling) for engine in engines)
            for other in others:
                assert [c.token_ids for c in other] == [c.token_ids for c in first]
                assert [c.finish_reason for c in other] == [c.finish_reason for c in first]
            seen.add(first[1].token_ids)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            for engine in engines:
                restore(engine, reference)
    finally:
        for engine in engines:
            engine.close()
    assert len(seen) > 1  # the updates changed the answers


def test_prompts_that_do_not_fit_into_a_batch_together(engine: Engine, prompts: list[Prompt], reference: Any) -> None:
    """A batch of 512 positions ends within the last of these prompts, of which no token is sampled in that batch."""
    restore(engine, reference)
    many = [prompts[2]] * 5
    assert 512 < sum(len(prompt.token_ids) for prompt in many) < 5 * 256
    for prompt, completion in zip(many, generate(engine, many, range(5), Sampling(max_tokens=8)), strict=True):
        reported = torch.tensor(completion.rollout_logprobs)
        torch.testing.assert_close(trainer_logprobs(reference, prompt, completion, 1.0), reported, rtol=0, atol=1e-4)


def test_a_request_over_the_context_is_refused(engine: Engine, prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match="over max_model_len=256"):
        generate(engine, [prompts[2]], [0], Sampling(max_tokens=250))


def test_completions_come_while_others_are_sampled(engine: Engine, prompts: list[Prompt], reference: Any) -> None:
    # More than are sampled together.
    before = dict(engine.generate(prompts * 17, range(68), Sampling(max_tokens=24)))
    coming = engine.generate(prompts * 17, range(68), Sampling(max_tokens=24))
    next(coming)
    with torch.no_grad():  # what is sampled after the first was handed over has other weights
        changed = [(n, p + 0.05 * torch.randn_like(p)) for n, p in reference.named_parameters()]
    engine.load_weights(changed, 1)
    after = dict(coming)
    restore(engine, reference)
    assert len(after) == 67
    assert any(after[place] != before[place] for place in after)


def written(completions: list[Completion], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]


def test_bad_words_are_never_written(engine: Engine, prompts: list[Prompt], tiny_tokenizer: Any) -> None:
    plain = generate(engine, prompts * 8, range(32), Sampling(max_tokens=40))
    letters = tuple(chr(c) for c in range(ord("a"), ord("z") + 1))
    assert any(set(text) & set(letters) for text in written(plain, tiny_tokenizer))
    sampling = Sampling(max_tokens=40, bad_words=letters)
    if not knows(engine, sampling, prompts):
        return
    without = generate(engine, prompts * 8, range(32), sampling)
    assert not any(set(text) & set(letters) for text in written(without, tiny_tokenizer))


def test_a_logit_bias_decides(engine: Engine, prompts: list[Prompt], tiny_tokenizer: Any) -> None:
    (token,) = tiny_tokenizer.encode("z", add_special_tokens=False)
    completions = generate(engine, prompts, range(4), Sampling(max_tokens=6, logit_bias={token: 100.0}))
    assert {c.token_ids for c in completions} == {(token,) * 6}


def test_prompts_have_settings_of_their_own(engine: Engine, prompts: list[Prompt], tiny_tokenizer: Any) -> None:
    (token,) = tiny_tokenizer.encode("z", add_special_tokens=False)
    own = [{}, {"max_tokens": 3}, {"logit_bias": {token: 100.0}}, {"max_tokens": 5}]
    given = [replace(prompt, sampling=settings) for prompt, settings in zip(prompts, own, strict=True)]
    seeds = [11, 12, 13, 14]
    plain = generate(engine, prompts, seeds, Sampling(max_tokens=8))
    each = generate(engine, given, seeds, Sampling(max_tokens=8))
    assert each[0].token_ids == plain[0].token_ids
    assert each[1].token_ids == plain[1].token_ids[:3]
    assert each[2].token_ids == (token,) * 8
    assert each[3].token_ids == plain[3].token_ids[:5]
    assert each[1].finish_reason == ("length" if len(plain[1].token_ids) > 3 else plain[1].finish_reason)


@pytest.mark.parametrize(
    ("guide", "holds"),
    [
        ({"regex": "[0-9]{2,3}"}, lambda text: re.fullmatch("[0-9]{2,3}", text)),
        ({"choice": ("yes", "no", "maybe")}, lambda text: text in ("yes", "no", "maybe")),
        (
            {
                "json_schema": '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], '
                '"additionalProperties": false}'
            },
            lambda text: isinstance(json.loads(text)["a"], bool),
        ),
    ],
)
def test_guided_completions(
    engine: Engine, prompts: list[Prompt], tiny_tokenizer: Any, guide: dict[str, Any], holds: Callable[[str], Any]
) -> None:
    sampling = Sampling(max_tokens=60, **guide)
    if not knows(engine, sampling, prompts):
        return
    completions = generate(engine, prompts * 4, range(16), sampling)
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert ended
    assert all(holds(text) for text in written(ended, tiny_tokenizer))
    assert len({c.token_ids for c in completions}) > 1
    mixed = [replace(prompts[0], sampling={"choice": ("yes",)}), prompts[1]]  # guided and not, in one call
    first, second = generate(engine, mixed, [1, 2], Sampling(max_tokens=12))
    assert written([first], tiny_tokenizer) == ["yes"]
    assert second == generate(engine, [prompts[1]], [2], Sampling(max_tokens=12))[0]


def test_own_settings_are_checked(prompts: list[Prompt]) -> None:
    def own(value: Any) -> dict[str, Any]:
        prompt = replace(prompts[0], example=Example((), None, {"settings": value}))
        return with_own_settings([prompt], "settings", Sampling(max_tokens=8))[0].sampling

    assert own(None) == {}
    assert own({"max_tokens": 4, "stop": ["x"], "regex": None}) == {"max_tokens": 4, "stop": ["x"]}
    assert own({"logit_bias": {"5": 1}}) == {"logit_bias": {5: 1.0}}
    for value, message in (
        ("x", "expected a mapping of max_tokens"),
        ({"temperature": 1}, "sets 'temperature'; expected one of max_tokens"),
        ({"max_tokens": 9}, r"max_tokens=9; expected 1\.\.8 \(rollout\.max_tokens\)"),
        ({"regex": "a", "choice": ["b"]}, "three ways to guide"),
    ):
        with pytest.raises(UserError, match=rf"rollout\.per_prompt=settings: .*{message}"):
            own(value)


def test_an_empty_call(engine: Engine) -> None:
    assert generate(engine, [], [], Sampling(max_tokens=4)) == []


def test_sample_seeds_are_places() -> None:
    seeds = {sample_seed(r, s, g, i) for r in range(3) for s in range(3) for g in range(3) for i in range(3)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(0, 1, 2, 3) == sample_seed(0, 1, 2, 3)


def test_groups_are_handed_on_when_whole_and_come_back_in_order() -> None:
    class Echo:
        def generate(
            self, prompts: list[Prompt], seeds: list[int], sampling: Sampling
        ) -> Iterator[tuple[int, Completion]]:
            for place in (5, 0, 2, 4, 3, 1):
                yield place, Completion((seeds[place] % 100,), (math.log(0.5),), "", "stop")

    drawn = [Prompt(Example((), None), (1,), "", group_id=g) for g in (4, 5)]
    whole: list[list[Rollout]] = []
    rollouts = sample_groups(Echo(), drawn, 3, Sampling(max_tokens=1), run_seed=0, step=2, on_group=whole.append)
    assert [(r.prompt.group_id, r.sample_index) for r in rollouts] == [(g, i) for g in (4, 5) for i in range(3)]
    assert rollouts[4].completion.token_ids == (sample_seed(0, 2, 5, 1) % 100,)
    assert whole == [rollouts[3:], rollouts[:3]]


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_the_cache_holds_twice_what_runs_together(engine: Engine) -> None:
    """Its limit is more: 64 completions of 256 tokens and a part of a block, in blocks of 32."""
    cache = engine._llm.llm_engine.vllm_config.cache_config
    assert cache.block_size == 32
    assert cache.num_gpu_blocks == 2 * 64 * (256 + 32) // 32


@pytest.mark.parametrize(("limit", "given"), [(2**22, 2**22), (2**26, 2 * 64 * 288 * 2 * 2 * 1 * 32 * 4)])
def test_the_cache_is_no_larger_than_its_limit(
    limit: int, given: int, tiny_dir: Path, tiny_end_tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's keys and values: two layers, one head of 32, 4 bytes each."""
    pytest.importorskip("vllm")
    from rlpost.rollout import vllm

    monkeypatch.setattr(vllm, "LLM", Mock())
    vllm.VLLMEngine(tiny_dir, tiny_end_tokens, max_model_len=256, kv_cache_bytes=limit)
    assert vllm.LLM.call_args.kwargs["kv_cache_memory_bytes"] == given
