from fractions import Fraction

import pytest

from rlpost.environments.calculator import Calculator, evaluate
from rlpost.types import Example


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 + 4", 7),
        ("12*7", 84),
        ("12 x 7", 84),
        ("(1 + 2) * -3", -9),
        ("1 / 3", Fraction(1, 3)),
        ("0.1 + 0.2", Fraction(3, 10)),
    ],
)
def test_arithmetic_is_exact(expression: str, value: Fraction | int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "not an arithmetic expression"),
        ("3 +", "not an arithmetic expression"),
        ("2 ** 10", "only numbers"),
        ("9 ^ 9", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("a", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("1 / 0", "division by zero"),
        ("1e300 * 1e300", "too large"),
        ("(" * 500 + "1", "not an arithmetic expression"),
    ],
)
def test_anything_else_is_refused(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)


def test_an_episode() -> None:
    episode = Calculator(role="tool", call_reward=0.25).reset(Example((), "84"), seed=0)
    first = episode.step("Let me see: <calc>12 * 7</calc>")
    assert (first.messages, first.reward, first.done) == ([{"role": "tool", "content": "= 84"}], 0.25, False)
    again = episode.step("<calc>1 / 3</calc>")
    assert (again.messages[0]["content"], again.reward) == ("= 0.333333", 0.0)
    assert episode.step("<calc>x</calc>").messages[0]["content"].startswith("error: ")
    assert episode.step("It is 84.").done
