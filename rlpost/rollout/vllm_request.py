"""What vLLM is asked for, in the trainer's process and over HTTP alike."""

from collections.abc import Sequence
from typing import Any

from rlpost.rollout.engine import Sampling


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
