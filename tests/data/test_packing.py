import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.data.balance import deal, deal_within
from rlpost.data.packing import attention_mask, pack, step_totals
from rlpost.types import PackedGroup
from tests.conftest import make_rollout


def test_a_shared_prompt_by_hand() -> None:
    """Prompt 5 6 7, completions 8 9 and 4: one row of six positions."""
    rollouts = [
        make_rollout(0, completion=[8, 9], sample_index=0, advantage=1.5),
        make_rollout(0, completion=[4], sample_index=1, advantage=-0.5, logprobs=[-2.0]),
    ]
    (batch,) = pack(rollouts, [True, False], token_budget=64)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert batch.segment_index.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.predictor_index.tolist() == [2, 3, 2]
    assert batch.target_ids.tolist() == [8, 9, 4]
    assert batch.sequence_index.tolist() == [0, 0, 1]
    assert batch.loss_mask.tolist() == [True, True, False]
    assert batch.active_lengths.tolist() == [2, 0]
    assert batch.advantages.tolist() == [1.5, -0.5]
    assert batch.rollout_logprobs.tolist() == [-1.0, -1.0, -2.0]
    sees = [[k for k in range(6) if attention_mask(batch)[0, 0, q, k]] for q in range(6)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5]]


def test_what_the_model_did_not_sample_is_masked() -> None:
    rollouts = [
        make_rollout(0, completion=[8, 9, 4], sampled_mask=[True, False, True]),
        make_rollout(0, completion=[7, 6], sampled_mask=[True, False], sample_index=1),
    ]
    for layout in ("shared_prefix", "padded"):
        (batch,) = pack(rollouts, [True, True], 64, layout)
        by_rollout = dict(zip(batch.rollout_ids, batch.completion_masks, strict=True))
        assert by_rollout[0].tolist() == [True, False, True]
        assert by_rollout[1].tolist() == [True, False]
        assert sorted(batch.active_lengths.tolist()) == [1, 2]
        assert torch.equal(batch.loss_mask, torch.cat(list(batch.completion_masks)))
        (batch,) = pack(rollouts[:1], [False], 64, layout)
        assert batch.loss_mask.tolist() == [False] * 3
    assert step_totals(rollouts, [True, True], 16).num_tokens == 3
    assert step_totals(rollouts, [True, False], 16).num_tokens == 2


def test_the_padded_layout_has_a_row_a_completion() -> None:
    rollouts = [make_rollout(0, completion=[8, 9]), make_rollout(0, completion=[4])]
    (batch,) = pack(rollouts, [True, True], token_budget=64, layout="padded")
    assert batch.input_ids.tolist() == [[5, 6, 7, 4, 0], [5, 6, 7, 8, 9]]
    assert batch.rollout_ids == [1, 0]
    # Padding sees itself alone, so that no softmax is empty, and nobody sees it.
    assert attention_mask(batch)[0, 0, 4].tolist() == [False] * 4 + [True]
    assert not attention_mask(batch)[0, 0, :4, 4].any()


def test_equal_prompts_of_two_groups_are_not_shared() -> None:
    (batch,) = pack([make_rollout(0), make_rollout(1)], [True, True], token_budget=64)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9]]
    assert batch.groups == [PackedGroup(0, 3, (2,)), PackedGroup(5, 3, (2,))]
    assert not attention_mask(batch)[0, 0, 5:, :5].any()


def test_totals_count_the_mask() -> None:
    totals = step_totals([make_rollout(completion=[1, 2]), make_rollout(completion=[3])], [True, False], 16)
    assert (totals.num_sequences, totals.num_tokens, totals.max_completion_tokens) == (2, 2, 16)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5),
    budget=st.integers(1, 60),
    layout=st.sampled_from(["shared_prefix", "padded"]),
)
def test_every_token_once_and_within_the_budget(sizes: list[list[int]], budget: int, layout: str) -> None:
    rollouts = [
        make_rollout(g, prompt=[g + 1] * (g + 1), completion=[10 * g + s] * size, sample_index=s)
        for g, group in enumerate(sizes)
        for s, size in enumerate(group)
    ]
    batches = pack(rollouts, [True] * len(rollouts), budget, layout)
    seen = [i for batch in batches for i in batch.rollout_ids]
    assert sorted(seen) == list(range(len(rollouts)))
    for batch in batches:
        assert batch.num_positions <= budget or len(batch.rollout_ids) == 1
        if layout == "shared_prefix":
            assert batch.input_ids.shape[0] == 1
            assert (batch.group_index >= 0).all()  # no padding
        for sequence, index in enumerate(batch.rollout_ids):
            mine = batch.sequence_index == sequence
            assert batch.target_ids[mine].tolist() == list(rollouts[index].completion.token_ids)
            prompt = rollouts[index].prompt.token_ids
            visible = attention_mask(batch)
            width = batch.input_ids.shape[1]
            # Each token is predicted from exactly its prompt and its own earlier tokens, at their own positions.
            for place, predictor in enumerate(batch.predictor_index[mine].tolist()):
                row, column = divmod(predictor, width)
                keys = visible[row, 0, column].nonzero().flatten()
                expected = [*prompt, *rollouts[index].completion.token_ids[:place]]
                assert batch.input_ids[row, keys].tolist() == expected
                assert batch.position_ids[row, keys].tolist() == list(range(len(expected)))


def test_a_group_over_the_budget_is_split_only_between_completions() -> None:
    rollouts = [make_rollout(0, completion=[1] * 10, sample_index=s) for s in range(3)]
    batches = pack(rollouts, [True] * 3, token_budget=24)
    assert sorted(b.num_positions for b in batches) == [13, 23]


def test_micro_batches_are_of_about_the_same_size() -> None:
    """Groups of 17, 14, 13 and 10 positions into two of 30: 17 + 10 and 14 + 13, not 17 + 13, 14 + 10."""
    sizes = {0: 14, 1: 11, 2: 10, 3: 7}
    rollouts = [make_rollout(group, completion=[1] * size) for group, size in sizes.items()]
    batches = pack(rollouts, [True] * 4, token_budget=30)
    assert [b.num_positions for b in batches] == [27, 27]


@given(sizes=st.lists(st.integers(1, 50), max_size=30), num_parts=st.integers(1, 6))
def test_dealing_is_fair(sizes: list[int], num_parts: int) -> None:
    parts = deal(sizes, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(sizes=st.lists(st.integers(1, 50), max_size=30), limit=st.integers(1, 80))
def test_nothing_but_what_is_too_large_by_itself_is_over_the_limit(sizes: list[int], limit: int) -> None:
    parts = deal_within(sizes, limit)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in part) <= limit or len(part) == 1 for part in parts)
    assert all(parts)
