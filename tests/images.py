"""Small pictures, and prompts with them for the tiny vision-language model."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlpost.data.prompts import PromptFormat
from rlpost.data.vision import Vision
from rlpost.types import IMAGE, Example, Prompt

RUN_OF_TOKENS = ["<fake_token_around_image>", "<global-img>", *["<image>"] * 4, "<fake_token_around_image>"]


def picture(seed: int) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8))


def png(seed: int) -> bytes:
    content = io.BytesIO()
    picture(seed).save(content, format="PNG")
    return content.getvalue()


def example(text: str, *images: bytes | str) -> Example:
    return Example(({"role": "user", "content": text},), None, images=images)


def prompts_of(vision: Vision, *examples: Example, **settings: Any) -> list[Prompt]:
    return PromptFormat(**settings).apply(examples, vision, "training")


def save(directory: Path, count: int) -> list[str]:
    names = [f"{seed}.png" for seed in range(count)]
    for seed, name in enumerate(names):
        picture(seed).save(directory / name)
    return names


ONE, TWO, NONE = (
    example(f"{IMAGE}What?", png(1)),
    example(f"First {IMAGE} then {IMAGE}.", png(2), png(3)),
    example("No image."),
)
