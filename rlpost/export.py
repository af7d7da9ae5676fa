"""rlpost-export: a checkpoint of a run as a plain Hugging Face directory, which transformers and vLLM load.

One process reads the shards of however many ranks; it holds the model in float32, twice where adapters are merged. The
directory is made beside its place and renamed, so it is whole or not there.
"""

import argparse
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch.distributed.checkpoint.api import CheckpointException
from transformers.utils import logging as transformers_logging

from rlpost.config import build
from rlpost.errors import UserError, run_command
from rlpost.models import load_model
from rlpost.schema import Config
from rlpost.trainer.lora import add_adapters, merged

# What a model's directory holds beside weights, which are written anew.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")


def checkpoint_of(run_dir: Path, step: int | None) -> Path:
    """The run's checkpoint of that step; None: its newest.

    Raises: UserError if the run or the checkpoint is not there.
    """
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run directory (no config.yaml)")
    saved = {int(path.name.removeprefix("step-")): path for path in (run_dir / "checkpoints").glob("step-*")}
    if not saved:
        raise UserError(f"{run_dir}: it has no checkpoint yet")
    chosen = max(saved) if step is None else step
    if chosen not in saved:
        raise UserError(f"--step {step}: the run has checkpoints of steps {', '.join(map(str, sorted(saved)))}")
    return saved[chosen]


def load_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """Into the model's own tensors, or its adapters where it has some: they have to be the checkpoint's in number and size.

    Raises: UserError if they are not, or the checkpoint cannot be read.
    """
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    state = {f"language_model.{name}": tensor for name, tensor in model.state_dict().items() if name not in frozen}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load({"model": state}, checkpoint_id=checkpoint / "weights")
    except CheckpointException as error:  # its text is a traceback
        reason = next((wrapped[0] for wrapped in error.failures.values()), error)
        raise UserError(f"{checkpoint}: cannot be read as {type(model).__name__}: {reason}") from error


def export(run_dir: Path, out: Path, step: int | None = None, dtype: str = "float32") -> Path:
    """Returns: the checkpoint that was exported.

    Raises: UserError for a run, a step or a place that will not do.
    """
    checkpoint = checkpoint_of(run_dir, step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty directory; choose another")
    cfg = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(run_dir / "config.yaml"))
    source = build(cfg.model)
    directory = source.directory()
    model: Any = load_model(directory, torch.float32, source.trust_remote_code)
    lora = cfg.trainer.lora
    if lora.rank:
        add_adapters(model, lora.rank, lora.alpha, lora.targets)
    load_weights(model, checkpoint)
    if lora.rank:  # a model without them, and what they come to
        weights = dict(merged(model))
        model = load_model(directory, torch.float32, source.trust_remote_code)
        model.load_state_dict(weights, strict=False)  # a tied head has one name only
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        for file in sorted(file for pattern in COPIED for file in directory.glob(pattern)):
            if not file.name.endswith(".index.json"):  # of the weights' files
                shutil.copy(file, building)
        model.to(getattr(torch, dtype)).save_pretrained(building)
        building.chmod(0o755)  # temporary directories and new safetensors files are their owner's alone
        for file in building.iterdir():
            file.chmod(0o644)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return checkpoint


def main() -> None:
    run_command("rlpost-export", _main)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="rlpost-export", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path, help="a directory that is not there yet, or is empty")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    checkpoint = export(arguments.run_dir, arguments.out, arguments.step, arguments.dtype)
    print(f"{arguments.out}: {checkpoint}, {arguments.dtype}")
    return 0


if __name__ == "__main__":
    main()
