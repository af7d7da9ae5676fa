"""A calculator tool: the model writes <calc>12 * 7</calc>, the environment answers, the model goes on."""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlpost.environments.protocol import Episode, Reply
from rlpost.types import Example

_CALL = re.compile(r"<calc>([^<]{0,200})</calc>")
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LARGEST_BITS = 512


@dataclass(frozen=True)
class Calculator:
    """Evaluates the first call of a turn; a turn without one is the answer, and ends the episode.

    Attributes:
        role: the role of the message with the result; models without a tool role in their chat template take "user".
        call_reward: given once, for the first call that could be evaluated.
        stop: texts that end a turn, so that the result can be given.
    """

    role: str = "user"
    call_reward: float = 0.0
    stop: Sequence[str] = ("</calc>",)

    def reset(self, example: Example, seed: int) -> Episode:
        return _Session(self)


class _Session:
    def __init__(self, calculator: Calculator) -> None:
        self._calculator = calculator
        self._rewarded = False

    def step(self, completion: str) -> Reply:
        call = _CALL.search(completion)
        if call is None:
            return Reply(done=True)
        try:
            result = evaluate(call.group(1))
        except ValueError as error:
            return self._reply(f"error: {error}", 0.0)
        reward = 0.0 if self._rewarded else self._calculator.call_reward
        self._rewarded = True
        return self._reply(f"= {_written(result)}", reward)

    def _reply(self, text: str, reward: float) -> Reply:
        return Reply([{"role": self._calculator.role, "content": text}], reward)


def evaluate(expression: str) -> Fraction:
    """Sums, products and quotients of numbers, exactly.

    Raises: ValueError for anything else.
    """
    try:
        tree = ast.parse(expression.strip().replace("^", "**").replace("x", "*"), mode="eval")
        return _evaluate(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("only numbers, + - * / and brackets are understood")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ValueError("too large")
    return value


def _written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
