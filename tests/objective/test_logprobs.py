import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.objective.logprobs import SamplingDistribution, token_logprobs


def test_two_tokens_by_hand() -> None:
    """Logits (0, ln 3): probabilities 1/4 and 3/4."""
    hidden = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    head = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0, 1]))
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.tolist() == pytest.approx([expected, expected])


def test_temperature_tempers() -> None:
    """At temperature 1/2 the same logits are (0, ln 9): probabilities 1/10 and 9/10."""
    hidden = torch.tensor([[1.0]], dtype=torch.float64)
    head = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    logprobs, _ = token_logprobs(hidden, head, torch.tensor([1]), SamplingDistribution(0.5))
    assert logprobs.item() == pytest.approx(math.log(0.9))


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4]])
    head = torch.tensor([[1.0], [-1.0]])
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(-2e4)
    assert entropy.item() == pytest.approx(0.0)


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(0, 7),
    chunk_rows=st.integers(1, 8),
    kept_rows=st.integers(0, 8),
    temperature=st.sampled_from([1.0, 0.6, 2.0]),
    seed=st.integers(0, 1000),
    use=st.sampled_from(["logprobs", "entropy", "both"]),
)
def test_chunks_equal_plain_autograd(
    num_tokens: int, chunk_rows: int, kept_rows: int, temperature: float, seed: int, use: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocabulary, width = 11, 5
    hidden = torch.randn(num_tokens, width, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    weights = torch.randn(2, num_tokens, dtype=torch.float64, generator=generator)

    def grads(logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = {"logprobs": (weights[0] * logprobs).sum(), "entropy": (weights[1] * entropy).sum()}
        return torch.autograd.grad(sum(parts.values()) if use == "both" else parts[use], (hidden, head))

    distribution = SamplingDistribution(temperature)
    chunked = token_logprobs(hidden, head, targets, distribution, chunk_rows * vocabulary, kept_rows * vocabulary)
    log_softmax = (hidden @ head.T / temperature).log_softmax(-1)
    plain = (
        log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        -(log_softmax.exp() * log_softmax).sum(-1),
    )
    for a, b in zip(chunked, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(grads(*chunked), grads(*plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_bfloat16_is_computed_in_float32() -> None:
    hidden = torch.randn(3, 4).bfloat16()
    head = torch.randn(6, 4).bfloat16()
    logprobs, _ = token_logprobs(hidden, head, torch.tensor([0, 1, 2]))
    assert logprobs.dtype == torch.float32
    expected = (hidden @ head.T).float().log_softmax(-1)[range(3), [0, 1, 2]]
    torch.testing.assert_close(logprobs, expected)


PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


@pytest.mark.parametrize(
    ("cuts", "target", "support"),
    [
        ({"top_k": 2}, 0, [0, 1]),
        ({"top_k": 9}, 0, [0, 1, 2, 3]),
        ({"top_p": 0.75}, 1, [0, 1]),
        ({"top_p": 0.85}, 1, [0, 1, 2]),
        ({"top_p": 0.1}, 0, [0]),
        ({"min_p": 0.2}, 2, [0, 1, 2]),
        ({"min_p": 0.2, "top_k": 2}, 0, [0, 1]),
        ({"top_k": 2, "top_p": 0.6}, 0, [0]),  # of the two kept, the first has 0.625
        ({"top_k": 1}, 3, [0, 3]),  # it was drawn, so it was inside
    ],
)
def test_logprobs_on_the_sampled_support(cuts: dict[str, float], target: int, support: list[int]) -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05, cut and normalised again; value, entropy and gradients."""
    hidden = torch.ones(1, 1, dtype=torch.float64)
    head = PROBS.log().unsqueeze(-1).requires_grad_()
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([target]), SamplingDistribution(**cuts))
    inside = PROBS[support] / PROBS[support].sum()
    assert logprobs.item() == pytest.approx(math.log(PROBS[target] / PROBS[support].sum()))
    assert entropy.item() == pytest.approx(-(inside * inside.log()).sum().item())
    plain = PROBS.log().requires_grad_()
    log_softmax = plain[support].log_softmax(-1)
    expected = log_softmax[support.index(target)] - 2 * (log_softmax.exp() * log_softmax).sum()
    (logprobs + 2 * entropy).sum().backward()
    (gradient,) = torch.autograd.grad(expected, plain)
    assert head.grad.flatten().tolist() == pytest.approx(gradient.tolist())


def test_tokens_far_apart_in_size_do_not_disturb_each_other() -> None:
    """Logits around 2000 and around 0 in one chunk: each row has its own largest."""
    hidden = torch.tensor([[1000.0], [0.0]])
    head = torch.tensor([[2.0], [1.0]])
    logprobs, entropy = token_logprobs(hidden, head, torch.tensor([0, 1]))
    assert logprobs.tolist() == pytest.approx([0.0, math.log(0.5)])
    assert entropy.tolist() == pytest.approx([0.0, math.log(2)])


@pytest.mark.parametrize("cuts", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}])
def test_each_token_has_its_own_support(cuts: dict[str, float]) -> None:
    """Three tokens at once equal each by itself."""
    generator = torch.Generator().manual_seed(3)
    hidden = 3 * torch.randn(3, 4, dtype=torch.float64, generator=generator)
    head = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    targets = torch.tensor([5, 0, 3])
    together = token_logprobs(hidden, head, targets, SamplingDistribution(**cuts))
    for t in range(3):
        alone = token_logprobs(hidden[t : t + 1], head, targets[t : t + 1], SamplingDistribution(**cuts))
        for a, b in zip(together, alone, strict=True):
            assert a[t].item() == pytest.approx(b.item())
    assert (together[1] < token_logprobs(hidden, head, targets)[1]).all()


@pytest.mark.parametrize(("kept_rows", "num_kept"), [(0, 0), (3, 1), (4, 2), (100, 3)])
def test_no_more_is_kept_for_the_backward_pass_than_asked_for(kept_rows: int, num_kept: int) -> None:
    """Five tokens in chunks of two: whole chunks are kept, as long as they fit."""
    hidden, head = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3)
    logprobs, _ = token_logprobs(hidden, head, torch.arange(5), chunk_entries=2 * 7, kept_entries=kept_rows * 7)
    saved = [tensor for tensor in logprobs.grad_fn.saved_tensors if tensor.shape[-1:] == (7,)]
    assert len(saved) == num_kept
