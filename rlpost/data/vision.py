"""Images in prompts: what a vision-language model's processor makes of them, for engines and for the trainer.

A processor writes each image as a run of tokens, whose embeddings the model replaces by what it sees. A prompt has its ids
twice: `token_ids` with these runs, which the model conditions on, and `unexpanded_ids` as its text has them, for engines
that expand images themselves.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rlpost.errors import UserError, require
from rlpost.types import IMAGE, Prompt


class Vision:
    """Args: processor: the processor of a model in Hugging Face format, with a tokenizer and a chat template."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        tokenizer = processor.tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(token for token, what in added if what.special)}
        self.tokenizer = tokenizer
        self.chat_template = processor.chat_template

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Render messages as a tokenizer does; contents are texts, in which IMAGE stands for an image."""
        split = [{**message, "content": _parts(message["content"])} for message in messages]
        return self._processor.apply_chat_template(split, **how)

    def encode(self, text: str, images: Sequence[str | bytes]) -> tuple[list[int], list[int]]:
        """Returns: the text's ids with images as runs of tokens, and as they stand in the text."""
        unexpanded = self.tokenizer.encode(text, add_special_tokens=False)
        if not images:
            return unexpanded, unexpanded
        return self._process([text], [images])["input_ids"][0].tolist(), unexpanded

    def truncated(self, text: str, images: Sequence[str | bytes], max_tokens: int) -> str | None:
        """The text without its beginning, within `max_tokens`; special tokens, those of images among them, all stay.

        None if they alone are more than that.
        """
        ids, unexpanded = self.encode(text, images)
        ordinary = [place for place, token in enumerate(unexpanded) if token not in self._special]
        cut, excess = 0, len(ids) - max_tokens
        while excess > 0:
            cut += excess
            if cut > len(ordinary):
                return None
            dropped = set(ordinary[:cut])
            # As text, and through the processor again: cut ids might not be what it makes of any prompt.
            text = self.tokenizer.decode([token for place, token in enumerate(unexpanded) if place not in dropped])
            excess = len(self.encode(text, images)[0]) - max_tokens
        return text

    def model_inputs(self, prompts: Sequence[Prompt], starts: Sequence[int], width: int) -> dict[str, Tensor]:
        """The model's inputs beside its ids: pixels and what belongs to them.

        Args:
            prompts: one a row, those without an image too.
            starts: where each begins in its row.
            width: the rows' width.

        Returns: by the name of the model's argument, for the rows' images in order; what there is for each position [R, W] is
            0 outside the prompts. Empty without images.
        """
        with_images = [row for row, prompt in enumerate(prompts) if prompt.images]
        if not with_images:
            return {}
        chosen = [prompts[row] for row in with_images]
        inputs = dict(self._process([prompt.text for prompt in chosen], [prompt.images for prompt in chosen]))
        ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
        for prompt, row_ids, row_mask in zip(chosen, ids, mask, strict=True):
            found = row_ids[row_mask.bool()].tolist()
            if found != list(prompt.token_ids[: len(found)]):
                raise RuntimeError("the processor gives a prompt other tokens than before")
        for name, values in inputs.items():
            if values.shape == ids.shape:
                inputs[name] = values.new_zeros(len(prompts), width)
                for row, row_values, row_mask in zip(with_images, values, mask, strict=True):
                    real = row_values[row_mask.bool()]
                    inputs[name][row, starts[row] : starts[row] + len(real)] = real
        return inputs

    def _process(self, texts: list[str], images: Sequence[Sequence[str | bytes]]) -> Mapping[str, Tensor]:
        opened = [[open_image(source) for source in row] for row in images]
        return self._processor(
            text=texts, images=opened, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
        )


def open_image(source: str | bytes) -> Any:
    """A PIL image, in RGB.

    Args: source: a file's path, or a file's content.

    Raises: UserError if it is no image.
    """
    require({"PIL": "images"}, "an image in a prompt")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        what = f"{len(source)} bytes of a row" if isinstance(source, bytes) else source
        raise UserError(f"{what}: not an image that can be read ({str(error).splitlines()[0]})") from error


def _parts(content: str) -> list[dict[str, str]]:
    """A text as the parts that processors' templates take."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts
