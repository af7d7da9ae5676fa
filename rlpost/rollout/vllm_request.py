"""Requests to vLLM, in the trainer's process and over HTTP alike."""

import base64
import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlpost.data.vision import open_image
from rlpost.rollout.engine import Sampling
from rlpost.types import Prompt


def sampling_params(sampling: Sampling, seed: int, end_token_ids: Sequence[int]) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams, as JSON has them."""
    guide = {"regex": sampling.regex, "json": sampling.json_schema, "choice": list(sampling.choice) or None}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop) or None,
        "bad_words": list(sampling.bad_words) or None,
        "logit_bias": sampling.biases or None,
        "structured_outputs": guide if sampling.is_guided else None,
        "stop_token_ids": list(end_token_ids),
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "logprobs": 0,  # the sampled token's own
        "detokenize": bool(sampling.stop),  # stop strings are looked for in the text
    }


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The prompt's fields of a request to a server, whose answer has the prompt's ids too where it has images: those it
    was continued from.
    """
    if not prompt.images:
        return {"token_ids": prompt.token_ids}
    parts = [{"type": "image_url", "url": _data_url(source)} for source in prompt.images]
    return {"token_ids": prompt.unexpanded_ids, "content_parts": parts, "return_token_ids": True}


def check_expanded(prompt: Prompt, token_ids: Sequence[int]) -> None:
    """Args: token_ids: the ids that vLLM continued.

    Raises: RuntimeError if they are not what the trainer conditions on.
    """
    if tuple(token_ids) != prompt.token_ids:
        raise RuntimeError("vLLM continued other tokens than it was given: it expands images differently")


@lru_cache(maxsize=64)  # a prompt is asked for many times in a row
def _data_url(source: str | bytes) -> str:
    """The image as the trainer sees it: a server would read a file with another mode or rotation differently."""
    content = io.BytesIO()
    open_image(source).save(content, format="PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
