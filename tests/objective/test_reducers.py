"""Reducers: weights by hand, scaling laws, and users' functions."""

import math
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpost.errors import UserError
from rlpost.objective.reducers import ConstantDivisor, FunctionReducer, SequenceMean, TokenMean, TokenSum
from rlpost.types import StepTotals
from tests.objective.helpers import view

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "miles_reducer.py"
TOTALS = StepTotals(num_sequences=2, num_tokens=4, max_completion_tokens=8)


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        # Two sequences of 2 and 3 tokens, the last token of the second masked: N = 2, M = 4, L_max = 8.
        (SequenceMean(), [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0]),
        (ConstantDivisor(10), [1 / 20] * 4 + [0]),
        (ConstantDivisor(), [1 / 2000] * 4 + [0]),
        (ConstantDivisor("max_tokens"), [1 / 16] * 4 + [0]),
        (TokenMean(), [1 / 4] * 4 + [0]),
        (TokenSum(), [1, 1, 1, 1, 0]),
    ],
)
def test_weights_by_hand(reducer: object, expected: list[float]) -> None:
    weights = reducer(view([2, 3], masked=[(1, 2)]), TOTALS)
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(expected)


def test_a_fully_masked_sequence_counts_in_the_mean_and_divides_by_nothing() -> None:
    weights = SequenceMean()(view([1, 1], masked=[(1, 0)]), StepTotals(2, 1, 8))
    assert weights.tolist() == [0.5, 0.0]
    assert TokenMean()(view([1], masked=[(0, 0)]), StepTotals(1, 0, 8)).tolist() == [0.0]


@pytest.mark.parametrize("divisor", [0, -3, math.nan, "longest"])
def test_a_divisor_must_be_positive(divisor: object) -> None:
    with pytest.raises(ValueError, match="divisor"):
        ConstantDivisor(divisor)


@given(divisor=st.integers(1, 4096), c=st.sampled_from([2, 4, 0.5, 1024]))
def test_a_divisor_times_c_is_exactly_the_weight_over_c(divisor: int, c: float) -> None:
    tokens = view([3, 1])
    assert torch.equal(ConstantDivisor(c * divisor)(tokens, TOTALS), ConstantDivisor(divisor)(tokens, TOTALS) / c)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), divisor=st.integers(1, 999))
def test_drgrpo_is_token_mean_times_mean_length_over_divisor(lengths: list[int], divisor: int) -> None:
    totals = StepTotals(len(lengths), sum(lengths), 9)
    tokens = view(lengths)
    expected = TokenMean()(tokens, totals) * (sum(lengths) / len(lengths)) / divisor
    torch.testing.assert_close(ConstantDivisor(divisor)(tokens, totals), expected, rtol=1e-14, atol=0)


def function(tmp_path: Path, body: str) -> str:
    file = tmp_path / "mine.py"
    signature = "def make(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):\n"
    file.write_text("import torch\n" + signature + textwrap.indent(textwrap.dedent(body), "    "))
    return f"{file}:make"


@pytest.mark.parametrize("lengths", [[3], [2, 3], [1, 4, 2]])
def test_the_miles_example_is_drgrpo_to_the_last_bit(lengths: list[int]) -> None:
    tokens = view(lengths, masked=[(0, 0)])
    totals = StepTotals(7, 19, 8)
    weights = FunctionReducer(f"{EXAMPLE}:get_pg_loss_reducer")(tokens, totals)
    expected = ConstantDivisor(1000)(tokens, totals)
    assert torch.all((weights - expected).abs() <= torch.finfo(torch.float64).eps * expected)
    per_token = FunctionReducer(f"{EXAMPLE}:get_pg_loss_reducer", calculate_per_token_loss=True)(tokens, totals)
    torch.testing.assert_close(per_token, TokenMean()(tokens, totals), rtol=1e-15, atol=0)


def test_the_default_reducer_of_miles_is_grpo(tmp_path: Path) -> None:
    path = function(
        tmp_path,
        """
        def reduce(x):
            parts = x.split(response_lengths)
            return sum((p * m).sum() / torch.clamp_min(m.sum(), 1) for p, m in zip(parts, loss_masks))
        return reduce
        """,
    )
    tokens = view([2, 3, 1], masked=[(1, 0), (2, 0)])
    torch.testing.assert_close(FunctionReducer(path)(tokens, TOTALS), SequenceMean()(tokens, TOTALS))


def test_a_function_may_use_lengths_and_masked_tokens_weigh_nothing(tmp_path: Path) -> None:
    """Weights 1 / total length; the function forgets the mask, the reducer does not."""
    path = function(
        tmp_path, "return lambda x: sum(p.sum() / t for p, t in zip(x.split(response_lengths), total_lengths))"
    )
    weights = FunctionReducer(path)(view([2, 1], masked=[(0, 1)], prompt_length=3), TOTALS)
    assert weights.tolist() == pytest.approx([1 / 5 / 2, 0, 1 / 4 / 2])


@pytest.mark.parametrize("per_token", [False, True])
def test_a_function_sees_whole_sequences_and_integer_masks(tmp_path: Path, per_token: bool) -> None:
    """Masks are int64, as the framework gives them; N = 1 and M = 2 divide."""
    path = function(tmp_path, "assert all(m.dtype == torch.int64 for m in loss_masks)\nreturn lambda x: x.sum()")
    weights = FunctionReducer(path, per_token)(view([2]), StepTotals(1, 2, 8))
    assert weights.tolist() == ([0.5, 0.5] if per_token else [1.0, 1.0])


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        weights = FunctionReducer(f"{EXAMPLE}:get_pg_loss_reducer")(view([2]), TOTALS)
    assert weights.tolist() == pytest.approx([1 / 2000] * 2)


def test_max_tokens_is_allowed() -> None:
    assert ConstantDivisor("max_tokens")(view([1]), TOTALS).tolist() == [1 / 16]


def test_an_empty_micro_batch(tmp_path: Path) -> None:
    tokens = view([1])
    empty = type(tokens)(
        tokens.sequence_index[:0], tokens.token_index[:0], tokens.loss_mask[:0], tokens.active_lengths[:0], [], []
    )
    assert FunctionReducer(f"{EXAMPLE}:get_pg_loss_reducer")(empty, TOTALS).tolist() == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return lambda x: (x ** 2).sum()", "not linear"),
        ("return lambda x: x.abs().sum()", "not linear"),
        ("return lambda x: x.sum() + 1", "not linear"),
        ("return lambda x: torch.relu(x.sum())", "not linear"),
        ("return lambda x: -torch.relu(-x.sum())", "not linear"),
        ("return lambda x: x.sum() / len(response_lengths)", "another one is beside it"),
        ("return lambda x: x.sum() / sum(response_lengths)", "another one is beside it"),
        ("return lambda x: x", "must return a tensor with one number"),
        ("return lambda x: 3.0", "must return a tensor with one number"),
    ],
)
def test_what_a_reducer_cannot_be_is_refused_at_once(body: str, message: str, tmp_path: Path) -> None:
    path = function(tmp_path, body)
    with pytest.raises(ValueError, match=message) as error:
        FunctionReducer(path)
    assert str(error.value).startswith(f"reducer.path={path}")


def test_a_reducer_of_nothing_is_zero(tmp_path: Path) -> None:
    path = function(tmp_path, "return lambda x: torch.zeros((), dtype=x.dtype, requires_grad=True) * 1")
    assert FunctionReducer(path)(view([2]), TOTALS).tolist() == [0.0, 0.0]


def test_a_function_linear_on_some_sequences_only_is_refused_where_it_is_not(tmp_path: Path) -> None:
    path = function(tmp_path, "return lambda x: (x ** 2).sum() if max(response_lengths) > 6 else x.sum()")
    reducer = FunctionReducer(path)
    assert reducer(view([2]), TOTALS).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="not linear"):
        reducer(view([7]), TOTALS)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "expected package.module:function"),
        ("nowhere_at_all:make", "No module named"),
        ("math:no_such", "math has no function 'no_such'"),
        ("/no/such/file.py:make", "no such file"),
        ("math:", "expected package.module:function"),
    ],
)
def test_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        FunctionReducer(path)
    assert str(error.value).startswith(f"reducer.path={path}")
