"""Examples become prompts: the chat template once, then token ids, then the length limit."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlpost.config.schema import PromptConfig
from rlpost.data.vision import Vision
from rlpost.errors import UserError
from rlpost.types import Example, Prompt

log = logging.getLogger(__name__)


class PromptFormat(PromptConfig):
    """Writes prompts for the model, as its settings say."""

    def apply(
        self, examples: Sequence[Example], tokenizer: Any, what: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Prompt]:
        """Tokenise all examples; counts of filtered and truncated prompts go to the log.

        Args:
            tokenizer: or a `Vision`, for a model that takes images.
            tools: an environment's, as JSON schemas.

        Raises: UserError if the tokenizer has no chat template, a prompt is overlong and `overlong` is
            "refuse", or none is left.
        """
        prompts: list[Prompt] = []
        num_overlong = 0
        encoded = self._encode(examples, tokenizer, tools)
        for row, (example, (text, token_ids, unexpanded_ids)) in enumerate(
            zip(examples, encoded, strict=True), start=1
        ):
            if len(token_ids) > self.max_tokens:
                num_overlong += 1
                if self.overlong == "refuse":
                    raise UserError(
                        f"{what} prompt {row} has {len(token_ids)} tokens, over prompt.max_tokens="
                        f"{self.max_tokens}; raise it, or set prompt.overlong=filter or truncate"
                    )
                if self.overlong == "filter":
                    continue
                text, token_ids, unexpanded_ids = self._truncated(
                    example, text, token_ids, tokenizer, f"{what} prompt {row}"
                )
            prompts.append(
                Prompt(example, tuple(token_ids), text, self.completion_prefix, unexpanded_ids=tuple(unexpanded_ids))
            )
        if num_overlong:
            done = "left out" if self.overlong == "filter" else "truncated"
            log.warning(
                "%d of %d %s prompts are over prompt.max_tokens=%d and were %s",
                *(num_overlong, len(examples), what, self.max_tokens, done),
            )
        if not prompts:
            raise UserError(
                f"all {len(examples)} {what} prompts are over prompt.max_tokens={self.max_tokens}; raise it"
            )
        return prompts

    def _encode(
        self, examples: Sequence[Example], tokenizer: Any, tools: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, list[int], list[int]]]:
        """Text and ids of each, and with images the ids before they were expanded."""
        texts = [self._render(example, tokenizer, [*tools, *self._own_tools(example)]) for example in examples]
        without_images = [text for text, example in zip(texts, examples, strict=True) if not example.images]
        # The template writes the special tokens itself; adding them again would double the BOS. Plain text
        # gets those the tokenizer adds to any text.
        settings = {"return_attention_mask": False, "return_token_type_ids": False}
        ids: list[list[int]] = []
        if without_images:  # one call: four fifths of a call's time are its own
            ids = _plain(tokenizer)(without_images, add_special_tokens=self.template == "plain", **settings)[
                "input_ids"
            ]
        plain = iter(ids)
        for text, example in zip(texts, examples, strict=True):
            if not example.images:
                yield text, next(plain), []
            elif isinstance(tokenizer, Vision):
                yield text, *tokenizer.encode(text, example.images)
            else:
                raise UserError(
                    "the task has images, and the model takes none: choose one that does (model=tiny_vision)"
                )

    def _truncated(
        self, example: Example, text: str, token_ids: list[int], tokenizer: Any, what: str
    ) -> tuple[str, list[int], list[int]]:
        if not example.images:
            token_ids = token_ids[-self.max_tokens :]
            return _plain(tokenizer).decode(token_ids), token_ids, []
        shorter = tokenizer.truncated(text, example.images, self.max_tokens)
        if shorter is None:
            raise UserError(
                f"{what}: its images and special tokens alone are over prompt.max_tokens={self.max_tokens}; raise it, or set "
                "prompt.overlong=filter"
            )
        return shorter, *tokenizer.encode(shorter, example.images)

    def _own_tools(self, example: Example) -> list[Mapping[str, Any]]:
        given = example.columns.get(self.tools) if self.tools else None
        try:
            own = json.loads(given) if isinstance(given, str) else given or []
        except ValueError:
            own = None
        if not (isinstance(own, list) and all(isinstance(tool, Mapping) for tool in own)):
            raise UserError(f"prompt.tools={self.tools}: a list of JSON schemas is expected in each row, not {given!r}")
        return own

    def _render(self, example: Example, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> str:
        messages = [dict(message) for message in example.messages]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        if self.template == "plain":
            if example.images or tools:
                raise UserError("prompt.template=plain writes neither images nor tools; set it to chat")
            return "\n\n".join(message["content"] for message in messages) + self.completion_prefix
        if tokenizer.chat_template is None:
            raise UserError("the model's tokenizer has no chat template; set prompt.template=plain")
        rendered = tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        for tool in tools:
            name = tool.get("function", tool).get("name", "")
            if name not in rendered:
                raise UserError(
                    f"the model's chat template does not describe tools ({name}); choose a model made for them"
                )
        return rendered + self.completion_prefix


def _plain(tokenizer: Any) -> Any:
    """The tokenizer alone, which texts without images go through."""
    return tokenizer.tokenizer if isinstance(tokenizer, Vision) else tokenizer
