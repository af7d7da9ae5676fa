"""The trainer on prompts with images: each row sees its own, however the rows are split."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlpost import distributed
from rlpost.config.schema import TrainerConfig
from rlpost.data.packing import pack
from rlpost.data.vision import Vision
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.trainer import model as trainer_model
from rlpost.types import Completion, Example, Prompt, Rollout
from tests.images import NONE, ONE, TWO, example, png, prompts_of

COMPLETIONS = [(40, 41, 42), (43, 44, 45, 46, 2)]
EXCLUDED = 259


@pytest.fixture
def policy_model(tiny_vision_dir: Path, vision: Vision, process_group: None) -> trainer_model.PolicyModel:
    language_model = trainer_model.load(tiny_vision_dir).double()
    distribution = SamplingDistribution(excluded=(EXCLUDED,))
    return trainer_model.shard(language_model, distribution, distributed.sharding_mesh(), TrainerConfig(), vision)


def rollouts(vision: Vision, *examples: Example) -> list[Rollout]:
    return [
        Rollout(Prompt(**{**vars(prompt), "group_id": group}), Completion(ids, (-1.0,) * len(ids), "", "stop"), sample)
        for group, prompt in enumerate(prompts_of(vision, *examples))
        for sample, ids in enumerate(COMPLETIONS)
    ]


def scored(
    policy_model: trainer_model.PolicyModel, made: list[Rollout], token_budget: int
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities by rollout, and the gradient of a sum that weighs every token differently."""
    found: dict[int, torch.Tensor] = {}
    policy_model.zero_grad()
    for batch in pack(made, [True] * len(made), token_budget, policy_model.layout):
        logprobs, _ = policy_model(batch)
        weights = 1.0 + batch.token_index + 10 * torch.tensor(batch.rollout_ids)[batch.sequence_index]
        (logprobs * weights).sum().backward()
        sizes = torch.bincount(batch.sequence_index).tolist()
        found.update(zip(batch.rollout_ids, logprobs.detach().split(sizes), strict=True))
    return found, {name: p.grad for name, p in policy_model.named_parameters() if p.grad is not None}


def test_log_probabilities_are_the_models(
    policy_model: trainer_model.PolicyModel, vision: Vision, tiny_vision_dir: Path
) -> None:
    """One sequence at a time through the plain model, the image's token left out of the softmax."""
    assert policy_model.layout == "padded"
    plain = AutoModelForImageTextToText.from_pretrained(tiny_vision_dir, dtype=torch.float64).eval()
    made = rollouts(vision, ONE, NONE, TWO)
    found, _ = scored(policy_model, made, 10_000)
    for i, rollout in enumerate(made):
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion.token_ids]])
        images = vision.model_inputs([rollout.prompt], [0], ids.shape[1])
        with torch.no_grad():
            logits = plain(input_ids=ids, **images).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        logits[:, EXCLUDED] = -torch.inf
        chosen = torch.tensor(rollout.completion.token_ids).unsqueeze(-1)
        expected = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=1e-6)  # pixels are float32


def test_no_split_changes_the_gradient(policy_model: trainer_model.PolicyModel, vision: Vision) -> None:
    made = rollouts(vision, ONE, NONE, TWO)
    found, gradient = scored(policy_model, made, 10_000)
    assert any("vision" in name for name in gradient)
    for budget in (1, 80, 130):
        again, other = scored(policy_model, made, budget)
        assert other.keys() == gradient.keys()
        for i in found:
            torch.testing.assert_close(again[i], found[i], rtol=1e-9, atol=1e-9)
        for name in gradient:
            torch.testing.assert_close(other[name], gradient[name], rtol=1e-8, atol=1e-9)


def test_an_image_is_seen_by_its_own_rows_alone(policy_model: trainer_model.PolicyModel, vision: Vision) -> None:
    before, _ = scored(policy_model, rollouts(vision, ONE, NONE, TWO), 10_000)
    other = example(ONE.messages[0]["content"], png(9))
    after, _ = scored(policy_model, rollouts(vision, other, NONE, TWO), 10_000)
    for i in (0, 1):
        assert not torch.allclose(after[i], before[i], atol=1e-6)
    for i in range(2, 6):
        assert torch.equal(after[i], before[i])


def test_every_parameter_has_a_gradient_where_no_row_has_an_image(
    policy_model: trainer_model.PolicyModel, vision: Vision
) -> None:
    """Or ranks would wait for each other: zeros for the vision tower."""
    _, gradient = scored(policy_model, rollouts(vision, NONE), 10_000)
    assert gradient.keys() == dict(policy_model.named_parameters()).keys()
    assert all((g == 0).all() for name, g in gradient.items() if "vision" in name)
    assert any((g != 0).any() for name, g in gradient.items() if "text_model" in name)
