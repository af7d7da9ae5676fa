from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.data.stream import PromptStream
from rlpost.errors import UserError
from rlpost.types import Example, Prompt

PROMPTS = [Prompt(Example((), str(i)), (i,), str(i)) for i in range(7)]


def test_every_pass_holds_every_prompt_once() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    first, second = stream.draw(7), stream.draw(7)
    assert sorted(p.text for p in first) == sorted(p.text for p in second) == sorted(p.text for p in PROMPTS)
    assert [p.text for p in first] != [p.text for p in second]


def test_a_prompt_drawn_twice_makes_two_groups() -> None:
    drawn = PromptStream(PROMPTS[:1], seed=0).draw(3)
    assert [p.group_id for p in drawn] == [0, 1, 2]


@given(seed=st.integers(0, 99), per_step=st.integers(1, 9), before=st.integers(0, 5))
def test_a_restored_stream_goes_on_alike(seed: int, per_step: int, before: int) -> None:
    stream = PromptStream(PROMPTS, seed)
    for _ in range(before):
        stream.draw(per_step)
    restored = PromptStream(PROMPTS, seed)
    restored.load_state_dict(stream.state_dict())
    assert restored.draw(per_step) == stream.draw(per_step)


def test_seeds_give_other_orders() -> None:
    orders = {tuple(p.text for p in PromptStream(PROMPTS, seed).draw(7)) for seed in range(5)}
    assert len(orders) > 1


def test_one_pool_keeps_the_order_it_always_had() -> None:
    """Pass e of seed s is numpy's permutation under [s, e]: runs and their checkpoints depend on it."""
    expected = [str(i) for e in (0, 1) for i in np.random.default_rng([3, e]).permutation(7)]
    assert [p.text for p in PromptStream(PROMPTS, seed=3).draw(14)] == expected


def mixed(sizes: dict[str, int]) -> list[Prompt]:
    return [
        Prompt(Example((), None, {"level": i % 3}, task), (i,), f"{task}{i}")
        for task, n in sizes.items()
        for i in range(n)
    ]


@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1),
    seed=st.integers(0, 9),
    count=st.integers(1, 200),
)
def test_a_mixture_is_never_a_prompt_off_its_shares(weights: dict[str, float], seed: int, count: int) -> None:
    stream = PromptStream(mixed(dict.fromkeys(weights, 5)), seed, weights)
    drawn = Counter(p.example.task for p in stream.draw(count))
    for task, weight in weights.items():
        assert abs(drawn[task] - count * weight / sum(weights.values())) <= len(weights)


def test_a_mixtures_tasks_have_passes_of_their_own() -> None:
    stream = PromptStream(mixed({"a": 4, "b": 8}), 0, {"a": 1, "b": 1})
    drawn = stream.draw(16)
    assert [p.group_id for p in drawn] == list(range(16))
    texts = Counter(p.text for p in drawn)
    assert {texts[f"a{i}"] for i in range(4)} == {2}
    assert {texts[f"b{i}"] for i in range(8)} == {1}
    restored = PromptStream(mixed({"a": 4, "b": 8}), 0, {"a": 1, "b": 1})
    stream.draw(3)
    restored.load_state_dict(stream.state_dict())
    assert restored.draw(30) == stream.draw(30)


def test_a_curriculum_rises_once_and_is_shuffled_within_and_after() -> None:
    prompts = mixed({"a": 30})
    first = PromptStream(prompts, 0, curriculum="level").draw(30)
    levels = [p.example.columns["level"] for p in first]
    assert levels == sorted(levels)
    assert [p.text for p in first[:10]] != sorted(p.text for p in first[:10])
    stream = PromptStream(prompts, 0, curriculum="level")
    stream.draw(30)
    second = [p.example.columns["level"] for p in stream.draw(30)]
    assert second != sorted(second)


def test_a_curriculum_names_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"stream\.curriculum=depth: .* no such column; it has level"):
        PromptStream(mixed({"a": 3}), 0, curriculum="depth")
    odd = [Prompt(Example((), None, {"level": level}), (), "") for level in (1, "two")]
    with pytest.raises(UserError, match=r"stream\.curriculum=level: its values cannot be ordered"):
        PromptStream(odd, 0, curriculum="level")
