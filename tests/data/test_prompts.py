import logging
from typing import Any

import pytest

from rlpost.data.prompts import PromptFormat
from rlpost.data.tasks import user_message
from rlpost.errors import UserError
from rlpost.types import Example


def example(text: str) -> Example:
    return Example(user_message(text), "1")


def test_the_template_is_applied_once_with_one_bos_a_message(tiny_tokenizer: Any) -> None:
    (prompt,) = PromptFormat().apply([example("hi")], tiny_tokenizer, "training")
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    bos = tiny_tokenizer.bos_token_id
    assert prompt.token_ids[0] == bos
    assert prompt.token_ids.count(bos) == 2  # one a message, none added in front
    assert tiny_tokenizer.decode(prompt.token_ids) == prompt.text


def test_a_tokenizer_that_adds_a_bos_does_not_double_it(tiny_tokenizer: Any) -> None:
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    adding = deepcopy(tiny_tokenizer)
    bos = (adding.bos_token, adding.bos_token_id)
    adding._tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    assert adding.encode("x")[0] == adding.bos_token_id
    (prompt,) = PromptFormat().apply([example("hi")], adding, "training")
    assert prompt.token_ids[:2].count(adding.bos_token_id) == 1
    (plain,) = PromptFormat(template="plain").apply([example("hi")], adding, "training")
    assert plain.token_ids[0] == adding.bos_token_id  # plain text gets what the tokenizer adds to any text


def test_system_prompt_and_completion_prefix(tiny_tokenizer: Any) -> None:
    fmt = PromptFormat(system="Be brief.", completion_prefix="<think>")
    (prompt,) = fmt.apply([example("hi")], tiny_tokenizer, "training")
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert prompt.text.endswith("assistant\n<think>")
    assert prompt.completion_prefix == "<think>"
    own = Example(({"role": "system", "content": "Own."}, *user_message("hi")), None)
    (prompt,) = fmt.apply([own], tiny_tokenizer, "training")
    assert "Be brief" not in prompt.text


def test_plain_needs_no_template(tiny_tokenizer: Any) -> None:
    (prompt,) = PromptFormat(template="plain", system="S").apply([example("hi")], tiny_tokenizer, "training")
    assert prompt.text == "S\n\nhi"


def test_no_template_is_a_users_error(tiny_tokenizer: Any) -> None:
    from copy import deepcopy

    bare = deepcopy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(UserError, match=r"prompt\.template=plain"):
        PromptFormat().apply([example("hi")], bare, "training")


@pytest.mark.parametrize("overlong", ["refuse", "filter", "truncate"])
def test_overlong_prompts(overlong: str, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    short, long = example("hi"), example("x" * 100)
    limit = 60
    fmt = PromptFormat(max_tokens=limit, overlong=overlong)
    if overlong == "refuse":
        with pytest.raises(UserError, match=r"training prompt 2 has \d+ tokens, over prompt.max_tokens=60"):
            fmt.apply([short, long], tiny_tokenizer, "training")
        return
    with caplog.at_level(logging.WARNING):
        prompts = fmt.apply([short, long], tiny_tokenizer, "training")
    assert "1 of 2 training prompts" in caplog.text
    if overlong == "filter":
        assert [p.example for p in prompts] == [short]
    else:
        assert len(prompts[1].token_ids) == limit
        assert prompts[1].text.endswith("assistant\n")  # its beginning is cut
        assert tiny_tokenizer.decode(prompts[1].token_ids) == prompts[1].text


def test_none_left_is_an_error(tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="all 1 training prompts"):
        PromptFormat(max_tokens=3).apply([example("hi")], tiny_tokenizer, "training")
