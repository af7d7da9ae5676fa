"""rlpost-export: what comes out is the trainer's policy, in a directory that needs nothing of rlpost."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.commands.export import export, main
from rlpost.errors import UserError
from rlpost.models.tiny import TinyLlama
from rlpost.trainer.checkpoint import Checkpoints
from tests.runs import LIGHT, rlpost, weights
from tests.trainer.test_lora import make
from tests.trainer.test_policy import groups, make_policy, rollouts

IDS = (5, 60, 70, 80, 90, 100)


NAMED = {"name": "n", "run_dir": "r", "tracking": {"experiment": "n"}}  # what every configuration has


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code."""
    monkeypatch.setattr(sys, "argv", ["rlpost-export", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.slow
def test_a_run_of_two_ranks_becomes_the_model_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["steps=2", "cluster=cpu2", "cluster.threads=1", "tracking=none"]
    rlpost(tmp_path, *LIGHT, *settings, "optimizer.lr=0.05", "checkpoint.every=1", "run_dir=run")
    out = tmp_path / "exported"
    assert command(monkeypatch, tmp_path / "run", out) == 0
    assert capsys.readouterr().out == f"{out}: {tmp_path}/run/checkpoints/step-000002, float32\n"

    trained = AutoModelForCausalLM.from_pretrained(TinyLlama().directory(), dtype=torch.float32)
    initial = logits(trained)
    saved = weights(tmp_path / "run", 2)["model"]
    trained.load_state_dict({name.removeprefix("language_model."): tensor for name, tensor in saved.items()})
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.equal(logits(model), logits(trained))
    assert not torch.equal(logits(model).argmax(-1), initial.argmax(-1))
    assert "lm_head.weight" not in load_file(out / "model.safetensors")  # it is tied
    before = export(tmp_path / "run", tmp_path / "before", step=1)
    assert before.name == "step-000001"
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "before")), logits(model))


@pytest.fixture
def run(tmp_path: Path, process_group: None) -> Path:
    """A run of an untied model with checkpoints of steps 3 and 10, of weights all 0.25 and 0.5."""
    source = TinyLlama(tied=False)
    policy = make_policy(source.directory())
    checkpoints = Checkpoints(tmp_path / "run/checkpoints")
    for step, value in ((3, 0.25), (10, 0.5)):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.fill_(value)
        checkpoints.save(policy, step, {})
        checkpoints.finish()
    cfg = {"model": {"_target_": "rlpost.models.tiny.TinyLlama", "tied": False}}
    OmegaConf.save(OmegaConf.create({**NAMED, **cfg}), tmp_path / "run/config.yaml")
    return tmp_path / "run"


def test_the_directory_is_plain(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a/b"
    out.mkdir(parents=True)
    assert export(run, out, dtype="bfloat16") == run / "checkpoints/step-000010"
    assert [path.name for path in out.parent.iterdir()] == ["b"]
    assert all(path.stat().st_mode & 0o004 for path in (out, *out.iterdir()))
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" in tensors
    assert all(tensor.dtype == torch.bfloat16 and (tensor == 0.5).all() for tensor in tensors.values())
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    tokenizer, original = (AutoTokenizer.from_pretrained(d) for d in (out, TinyLlama().directory()))
    messages = [{"role": "user", "content": "hé"}]
    for how in ({"tokenize": False}, {"add_generation_prompt": True, "return_dict": False}):
        assert tokenizer.apply_chat_template(messages, **how) == original.apply_chat_template(messages, **how)
    assert (out / "generation_config.json").is_file()


def test_a_step_is_chosen(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", step=3)
    assert all((tensor == 0.25).all() for tensor in load_file(tmp_path / "out/model.safetensors").values())
    with pytest.raises(UserError, match=r"--step 4: the run has checkpoints of steps 3, 10$"):
        export(run, tmp_path / "other", step=4)


def test_what_cannot_be_exported_is_said_in_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    capsys.readouterr()
    assert command(monkeypatch, run, full) == 2
    said = f"rlpost-export: {full}: exists and is not an empty directory; choose another\n"
    assert capsys.readouterr() == ("", said)
    assert [path.name for path in full.iterdir()] == ["file"]
    with pytest.raises(UserError, match=r"not a run directory \(no config\.yaml\)"):
        export(tmp_path, tmp_path / "out")
    (run / "config.yaml").write_text(
        "name: n\nrun_dir: r\ntracking: {experiment: n}\n"
        "model: {_target_: rlpost.models.tiny.TinyLlama, tied: false, num_layers: 3}"
    )
    with pytest.raises(UserError, match="cannot be read as LlamaForCausalLM") as error:
        export(run, tmp_path / "out")
    assert "\n" not in str(error.value)
    for path in (run / "checkpoints").iterdir():
        os.rename(path, path.with_name(f".{path.name}"))
    with pytest.raises(UserError, match="it has no checkpoint yet"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_are_merged(tmp_path: Path, process_group: None) -> None:
    policy = make(TinyLlama().directory())
    made = rollouts()
    policy.update(made, groups(made), step=1)
    checkpoints = Checkpoints(tmp_path / "run/checkpoints")
    checkpoints.save(policy, 1, {})
    checkpoints.finish()
    cfg = {"model": {"_target_": "rlpost.models.tiny.TinyLlama"}, "trainer": {"lora": {"rank": 4, "alpha": 8.0}}}
    OmegaConf.save(OmegaConf.create({**NAMED, **cfg}), tmp_path / "run/config.yaml")
    export(tmp_path / "run", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = dict(policy.named_weights())
    found = dict(exported.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    initial = dict(AutoModelForCausalLM.from_pretrained(TinyLlama().directory()).named_parameters())
    assert any(not torch.equal(weight, initial[name]) for name, weight in found.items())
