"""A checkpoint as a plain Hugging Face directory, which transformers and vLLM load.

One process reads the shards of however many ranks; it holds the model in float32, twice where adapters are merged. The
directory is made beside its place and renamed, so it is whole or not there.
"""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rlpost.config.schema import LoRAConfig
from rlpost.errors import UserError
from rlpost.models.sources import load_model
from rlpost.trainer.lora import add_adapters, merged

# What a model's directory holds beside weights, which are written anew.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")


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


def write_model(
    directory: Path,
    checkpoint: Path,
    out: Path,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    lora: LoRAConfig | None = None,
) -> None:
    """Write the model of a checkpoint.

    Args:
        directory: the directory of the model that was trained.
        checkpoint: checkpoints/step-<n> of a run.
        out: a directory that is not there yet, or is empty.
        lora: the adapters that were trained; None, or of rank 0: none.

    Raises: UserError for a place or a checkpoint that will not do.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty directory; choose another")
    model: Any = load_model(directory, torch.float32, trust_remote_code)
    if lora and lora.rank:
        add_adapters(model, lora)
    load_weights(model, checkpoint)
    if lora and lora.rank:  # a model without them, and what they come to
        weights = dict(merged(model))
        model = load_model(directory, torch.float32, trust_remote_code)
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
