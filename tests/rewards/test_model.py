"""A reward model, for real: a tiny random classifier, its scores against those of each conversation alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlpost.errors import UserError
from rlpost.rewards.model import ModelReward


def save_classifier(target: Path, tiny_dir: Path, tokenizer: Any, labels: list[str]) -> str:
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_dir, num_labels=len(labels))
    config.id2label, config.label2id = dict(enumerate(labels)), {label: i for i, label in enumerate(labels)}
    LlamaForSequenceClassification(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return str(target)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, tiny_tokenizer: Any) -> str:
    return save_classifier(tmp_path_factory.mktemp("reward-model"), tiny_dir, tiny_tokenizer, ["score"])


ASKED = [[{"role": "user", "content": text}] for text in ("hi", "What is 3 + 4?", "a longer question " * 5, "hi")]
REPLIES = ["hello", "7", "no", "bye, and a little more"]


def scores(reward: ModelReward) -> list[float]:
    return reward(completions=REPLIES, messages=ASKED, prompts=[""] * 4)


def test_scores_are_those_of_each_conversation_alone(path: str, tiny_tokenizer: Any) -> None:
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    expected = []
    for asked, reply in zip(ASKED, REPLIES, strict=True):
        text = tiny_tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": reply}], tokenize=False)
        ids = torch.tensor([tiny_tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, -1]  # the last token, end token or not
            expected.append(model.score(hidden).item())
    assert len({round(value, 4) for value in expected}) == 4
    for batch_size in (1, 3, 16):
        assert scores(ModelReward(path, batch_size=batch_size)) == pytest.approx(expected, abs=1e-5)


def test_long_conversations_lose_their_beginning(path: str) -> None:
    reward = ModelReward(path, max_tokens=8)
    first, second = reward(completions=["x" * 50, "x" * 60], messages=ASKED[:2], prompts=["", ""])
    assert first == pytest.approx(second)
    assert first != pytest.approx(ModelReward(path)(completions=["x" * 50], messages=ASKED[:1], prompts=[""])[0])


def test_without_a_chat_template_prompt_and_completion_are_joined(path: str) -> None:
    reward = ModelReward(path)
    reward._tokenizer.chat_template = None
    joined = reward(completions=["bc"], messages=ASKED[:1], prompts=["a"])
    assert joined == pytest.approx(reward(completions=["c"], messages=ASKED[:1], prompts=["ab"]))


def test_a_labels_probability(tmp_path: Path, tiny_dir: Path, tiny_tokenizer: Any) -> None:
    path = save_classifier(tmp_path, tiny_dir, tiny_tokenizer, ["bad", "good"])
    good, bad = scores(ModelReward(path, label="good")), scores(ModelReward(path, label=0))
    assert [a + b for a, b in zip(good, bad, strict=True)] == pytest.approx([1.0] * 4)
    with pytest.raises(UserError, match=r"the model has 2 labels \(bad, good\); set label to one"):
        ModelReward(path)
    for label in ("god", 2):
        with pytest.raises(UserError, match=rf"label={label}: the model has bad, good"):
            ModelReward(path, label=label)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward: path=.*nowhere"):
        ModelReward(str(tmp_path / "nowhere"))
