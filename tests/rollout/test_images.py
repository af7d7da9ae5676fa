"""Engines on prompts with images, against the model itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlpost.data.vision import Vision
from rlpost.models.sources import end_token_ids, placeholder_token_ids
from rlpost.rollout.engine import Engine, Sampling
from rlpost.rollout.server import VLLMServers
from rlpost.types import Completion, Prompt
from tests.images import NONE, ONE, TWO, example, png, prompts_of
from tests.rollout.test_engines import generate, make_engine

GREEDY = Sampling(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module", params=["vllm", "transformers", pytest.param("servers", marks=pytest.mark.slow)])
def engine(
    request: pytest.FixtureRequest, tiny_vision_dir: Path, vision: Vision, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    end_tokens = end_token_ids(tiny_vision_dir, vision.tokenizer)
    if request.param == "servers":
        logs = str(tmp_path_factory.mktemp("logs"))
        engine: Engine = VLLMServers(tiny_vision_dir, end_tokens, 256, logs, threads=1, kv_cache_bytes=2**26)
    else:
        engine = make_engine(request.param, tiny_vision_dir, end_tokens)
    yield engine
    engine.close()


@pytest.fixture
def model(tiny_vision_dir: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(tiny_vision_dir, dtype=torch.float32).eval()


@torch.no_grad()
def continued(model: Any, vision: Vision, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Logits that predict the completion's tokens, one sequence at a time."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    images = vision.model_inputs([prompt], [0], ids.shape[1])
    return model(input_ids=ids, **images).logits[0, len(prompt.token_ids) - 1 : -1]


def assert_greedy(model: Any, vision: Vision, prompts: list[Prompt], completions: list[Completion]) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = continued(model, vision, prompt, completion)
        ids = torch.tensor(completion.token_ids)
        assert torch.equal(logits.argmax(-1), ids)
        expected = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.rollout_logprobs), expected, rtol=0, atol=1e-4)


def test_completions_are_the_models_before_and_after_an_update(engine: Engine, model: Any, vision: Vision) -> None:
    prompts = prompts_of(vision, ONE, NONE, TWO)
    before = generate(engine, prompts, [0, 1, 2], GREEDY)
    assert_greedy(model, vision, prompts, before)
    original = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" in name:  # what an image looks like, and nothing else
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    try:
        engine.load_weights(((name, parameter.detach()) for name, parameter in model.named_parameters()), 0)
        after = generate(engine, prompts, [0, 1, 2], GREEDY)
        assert_greedy(model, vision, prompts, after)
        assert after[0].rollout_logprobs != before[0].rollout_logprobs
        assert after[1] == before[1]
    finally:
        engine.load_weights(iter(original.items()), 0)


def test_what_is_sampled_depends_on_the_image(engine: Engine, vision: Vision) -> None:
    prompts = prompts_of(vision, *(example("<image>What?", png(seed)) for seed in (1, 2, 1)))
    first, other, again = generate(engine, prompts, [7, 7, 7], Sampling(max_tokens=16))
    assert first.token_ids == again.token_ids
    assert first.rollout_logprobs == pytest.approx(again.rollout_logprobs, abs=1e-4)
    assert first.rollout_logprobs != pytest.approx(other.rollout_logprobs, abs=1e-4)


def test_tokens_of_images_are_never_drawn(engine: Engine, vision: Vision, tiny_vision_dir: Path) -> None:
    (image,) = placeholder_token_ids(tiny_vision_dir)
    assert image == vision.tokenizer.convert_tokens_to_ids("<image>")
    biased = Sampling(max_tokens=8, logit_bias={image: 100.0})
    (drawn,) = generate(engine, prompts_of(vision, NONE), [3], biased)
    assert set(drawn.token_ids) == {image}
    excluded = Sampling(max_tokens=8, logit_bias={image: 100.0}, excluded=(image,))
    (drawn,) = generate(engine, prompts_of(vision, NONE), [3], excluded)
    assert image not in drawn.token_ids
