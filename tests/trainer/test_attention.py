"""A packed row against the mask that says what it means, and the models that cannot take one."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlpost import distributed
from rlpost.config.schema import TrainerConfig
from rlpost.data.packing import attention_mask, pack
from rlpost.errors import UserError
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.trainer import attention
from rlpost.trainer import model as trainer_model
from rlpost.trainer.policy import to_device
from rlpost.types import PackedBatch
from tests.conftest import make_rollout
from tests.trainer.test_policy import sharded


def batches(sizes: list[list[int]]) -> list[PackedBatch]:
    made = [
        make_rollout(g, prompt=[1] * (g + 1), completion=[2] * size, sample_index=s)
        for g, group in enumerate(sizes)
        for s, size in enumerate(group)
    ]
    return pack(made, [True] * len(made), token_budget=60)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
def test_equal_to_the_block_mask(sizes: list[list[int]], heads: tuple[int, int]) -> None:
    """Output and all three gradients, in float64, grouped heads too."""
    for batch in batches(sizes):
        length = batch.input_ids.shape[1]
        shapes = [(1, heads[0], length, 8), (1, heads[1], length, 8), (1, heads[1], length, 8)]
        q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
        where = attention.plan(batch.groups, torch.device("cpu"))
        ours, _ = attention.packed_attention(torch.nn.Module(), q, k, v, None, packed=where, scaling=0.3)
        mask = attention_mask(batch)
        plain = scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
        weight = torch.randn_like(ours)
        for a, b in zip(*(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (ours, plain)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_mask_for_gpus_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function behind FlexAttention's block mask, written out in full."""
    (batch,) = batches([[3, 1, 4], [2, 2]])
    length = batch.input_ids.shape[1]
    monkeypatch.setattr(
        "torch.nn.attention.flex_attention.create_block_mask",
        lambda visible, b, h, q, k, device: create_mask(visible, b, h, q, k, device),
    )
    assert torch.equal(attention.block_mask(batch), attention_mask(batch).expand(1, 1, length, length))


@pytest.fixture
def policy_model(tiny_dir: Path, process_group: None) -> trainer_model.PolicyModel:
    return trainer_model.shard(
        trainer_model.load(tiny_dir), SamplingDistribution(), distributed.sharding_mesh(), TrainerConfig()
    )


def scored(
    policy_model: trainer_model.PolicyModel, completions: list[list[int]], prompts: list[list[int]]
) -> Iterator[Any]:
    """Log-probabilities by completion; two completions a prompt, all in one row."""
    made = [make_rollout(i // 2, prompts[i // 2], c, sample_index=i % 2) for i, c in enumerate(completions)]
    (batch,) = pack(made, [True] * len(made), 1000)
    assert policy_model.layout == "shared_prefix"
    with torch.no_grad():
        logprobs, _ = policy_model(to_device(batch))
    order = [batch.rollout_ids.index(i) for i in range(len(made))]
    return [logprobs[batch.sequence_index == i].clone() for i in order]


def test_completions_that_share_a_row_do_not_see_each_other(policy_model: trainer_model.PolicyModel) -> None:
    completions = [[9, 10, 11], [12, 13], [14, 15, 16, 17], [18]]
    prompts = [[3, 4, 5], [6, 7]]
    before = scored(policy_model, completions, prompts)
    for changed in range(4):
        other = [list(c) for c in completions]
        other[changed] = [token + 50 for token in other[changed]]
        after = scored(policy_model, other, prompts)
        for i in range(4):
            assert torch.equal(after[i], before[i]) == (i != changed), (changed, i)
    # A prompt's change is seen by its own completions alone.
    after = scored(policy_model, completions, [[3, 99, 5], [6, 7]])
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [False, False, True, True]


SMALL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_a_sliding_window_gets_a_row_a_completion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, process_group: None
) -> None:
    """And then the window counts: scores are the model's own, far beyond its three tokens."""
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3, initializer_range=0.5)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = trainer_model.load(tmp_path)
    assert "sliding_attention" in caplog.text
    assert "row of its own" in caplog.text
    policy_model = sharded(model)
    assert policy_model.layout == "padded"
    made = [make_rollout(0, list(range(3, 12)), c) for c in ([20, 21, 22, 23, 24], [25, 26])]
    (batch,) = pack(made, [True] * 2, 1000, policy_model.layout)
    with torch.no_grad():
        logprobs, _ = policy_model(to_device(batch))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        for sequence, index in enumerate(batch.rollout_ids):
            prompt, completion = made[index].prompt.token_ids, made[index].completion.token_ids
            logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(completion)), list(completion)]
            torch.testing.assert_close(logprobs[batch.sequence_index == sequence], expected, rtol=0, atol=1e-5)


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SMALL, sliding_window=3, use_sliding_window=False)).save_pretrained(tmp_path)
    assert trainer_model.load(tmp_path).config._attn_implementation == attention.PACKED


def test_a_model_that_drops_what_it_is_handed_is_found_out(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that answers as if the row were one text: the two completions come out wrong."""

    def one_text(module: Any, q: Any, k: Any, v: Any, mask: Any, *, packed: Any, scaling: float, **_: Any) -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    attention.AttentionInterface.register(attention.PACKED, one_text)
    try:
        with caplog.at_level(logging.WARNING):
            model = trainer_model.load(tiny_dir)
    finally:
        attention.AttentionInterface.register(attention.PACKED, attention.packed_attention)
    assert model.config._attn_implementation == "sdpa"
    assert "a packed row changes its output" in caplog.text


def test_heads_of_keys_are_repeated_as_far_as_every_rank_needs_one() -> None:
    heads = [(8, 2, 2), (8, 2, 4), (8, 2, 8), (9, 3, 3), (9, 3, 9), (12, 4, 6), (2, 1, 2), (4, 4, 4)]
    assert [attention._repeats(*each) for each in heads] == [1, 2, 4, 1, 3, 3, 2, 1]


def test_a_row_that_cannot_be_split_over_ranks_is_refused(
    tiny_dir: Path, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)).save_pretrained(tmp_path)
    for directory, size, reason in (
        (tmp_path, 2, "MistralForCausalLM has trainer.layout=padded, whose rows are not split"),
        (tiny_dir, 3, "trainer.context_parallel=3 has to divide the model's 2 attention heads"),
    ):
        monkeypatch.setattr("rlpost.distributed.context_size", lambda size=size: size)
        with pytest.raises(UserError, match=reason):
            trainer_model.shard(
                trainer_model.load(directory), SamplingDistribution(), distributed.sharding_mesh(), TrainerConfig()
            )


def test_offloading_needs_a_gpu(tiny_dir: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.distributed.device", lambda: torch.device("cpu"))
    with pytest.raises(UserError, match=r"trainer\.cpu_offload=true moves weights off a GPU"):
        sharded(trainer_model.load(tiny_dir), TrainerConfig(cpu_offload=True))
