import json
import time
from functools import partial
from typing import Any

import pytest

from rlpost.data.prompts import PromptFormat
from rlpost.data.split import user_message
from rlpost.environments.tools import LONGEST_RESULT, Tools
from rlpost.errors import UserError
from rlpost.types import Example


def double(number: int, times: int = 2) -> int:
    """Multiplies a number.

    Args:
        number: what to multiply.
        times: by what.
    """
    if number == 13:
        raise LookupError("unlucky")
    return number * times


def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long.
    """
    time.sleep(seconds)
    return "x" * 2 * LONGEST_RESULT


def call(**written: Any) -> str:
    return f"<tool_call>\n{json.dumps(written)}\n</tool_call>"


@pytest.fixture
def tools() -> Tools:
    return Tools([double, wait], timeout=0.5)


def answer(tools: Tools, text: str) -> str:
    reply = tools.reset(Example((), None), 0).step(text)
    assert (reply.done, reply.reward) == (False, 0.0)
    (message,) = reply.messages
    assert message["role"] == "tool"
    return message["content"]


def test_every_call_of_a_turn_is_answered(tools: Tools) -> None:
    turn = (
        "Both:"
        + call(name="double", arguments={"number": 4})
        + call(name="double", arguments={"number": 5, "times": 3})
    )
    reply = tools.reset(Example((), None), 0).step(turn)
    assert list(reply.messages) == [
        {"role": "tool", "content": "8", "name": "double"},
        {"role": "tool", "content": "15", "name": "double"},
    ]
    assert not reply.done


def test_a_turn_without_a_call_is_the_answer(tools: Tools) -> None:
    reply = tools.reset(Example((), None), 0).step('It is 8. {"name": "double"}')
    assert reply.done
    assert not reply.messages


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (call(name="halve", arguments={}), "error: there is no tool 'halve', only double, wait"),
        (call(name="double", arguments={}), "error: double: missing a required argument: 'number'"),
        (call(name="double", arguments={"n": 1}), "error: double: missing a required argument: 'number'"),
        (call(name="double", arguments={"number": 1, "n": 1}), "error: double: got an unexpected keyword argument 'n'"),
        (call(name="double", arguments={"number": 13}), "error: double: LookupError: unlucky"),
        (call(name="double", arguments=[1]), 'error: a call has the form {"name": "...", "arguments": {...}}'),
        (call(name=3), 'error: a call has the form {"name": "...", "arguments": {...}}'),
        ("<tool_call>double(3)</tool_call>", "error: the call is not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: the call is not JSON"),
        (call(name="wait", arguments={"seconds": 30}), "error: wait: no result within 0.5 s"),
    ],
)
def test_the_model_reads_what_went_wrong(tools: Tools, written: str, error: str) -> None:
    assert answer(tools, written) == error


def test_long_results_are_cut(tools: Tools) -> None:
    assert answer(tools, call(name="wait", arguments={"seconds": 0})) == "x" * LONGEST_RESULT


def test_settings_of_a_function_may_be_fixed() -> None:
    assert answer(Tools([partial(double, times=10)]), call(name="double", arguments={"number": 4})) == "40"


def test_functions_need_hints_descriptions_and_names_of_their_own() -> None:
    def undescribed(number: int) -> int:
        return number

    def unhinted(number):  # type: ignore[no-untyped-def]
        """Says.

        Args:
            number: what.
        """

    for function, reason in (
        (undescribed, "undescribed because it has no docstring"),
        (unhinted, "number is missing a type"),
    ):
        with pytest.raises(UserError, match=f"environment.functions: .*{reason}"):
            Tools([function])
    with pytest.raises(UserError, match=r"two have the same name \(double, double\)"):
        Tools([double, double])


def test_prompts_describe_tools(tools: Tools, tiny_tokenizer: Any) -> None:
    own = {"type": "function", "function": {"name": "look_up", "description": "Looks it up.", "parameters": {}}}
    examples = [
        Example(user_message("q"), None, {"offered": given}) for given in (None, [own], json.dumps([own]), "no", [1])
    ]
    settings = PromptFormat(max_tokens=1000, tools="offered")
    plain, listed, as_text = settings.apply(examples[:3], tiny_tokenizer, "training", tools.tools)
    assert "Multiplies a number." in plain.text
    assert "look_up" not in plain.text
    assert "Multiplies a number." in listed.text
    assert "Looks it up." in listed.text
    assert as_text.text == listed.text
    assert tiny_tokenizer.decode(listed.token_ids) == listed.text
    for wrong in examples[3:]:
        with pytest.raises(UserError, match=r"prompt\.tools=offered: a list of JSON schemas is expected"):
            settings.apply([wrong], tiny_tokenizer, "training")


def test_a_template_that_leaves_tools_out_is_refused(tools: Tools, tiny_tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UserError, match=r"chat template does not describe tools \(double\)"):
        PromptFormat().apply([Example(user_message("q"), None)], tiny_tokenizer, "training", tools.tools)
