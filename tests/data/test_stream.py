from hypothesis import given
from hypothesis import strategies as st

from rlpost.data.stream import PromptStream
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
