"""Checkpoints: everything the next step depends on, complete or not there at all.

checkpoints/step-000010/   model and optimizer shards (torch.distributed.checkpoint), state.json, rng-<rank>.pt,
                           parts.pickle (the states of the run's other parts, by name)
"""

import json
import logging
import pickle
import random
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from rlpost import distributed
from rlpost.errors import UserError
from rlpost.trainer.model import PolicyModel
from rlpost.trainer.policy import Policy

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run directory. `keep` newest ones are kept; None keeps all.

    They are written while training goes on, one at a time: a copy of everything is taken first.
    """

    def __init__(self, directory: Path, keep: int | None = 2) -> None:
        self._directory = directory
        self._keep = keep
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def latest(self) -> Path | None:
        """The newest complete checkpoint. One that was being written has another name, so it never counts."""
        complete = sorted(self._directory.glob("step-*"))
        return complete[-1] if complete else None

    def save(self, policy: Policy, step: int, about: Mapping[str, Any], parts: Mapping[str, Any] | None = None) -> None:
        """Begin a checkpoint of `step`, by all ranks together; visible only once it is whole.

        Args:
            about: facts about the run for a reader, as JSON.
            parts: the states of everything else that the next step depends on, by name; the main rank's are kept.

        Raises: RuntimeError if the one before could not be written.
        """
        self.finish()
        final = self._directory / f"step-{step:06d}"
        building = self._directory / f".writing-{step:06d}"
        if distributed.is_main():
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            everything = {"step": step, "schedule": policy.optimizer.state_dict(), **about}
            (building / "state.json").write_text(json.dumps(everything, default=_plain), encoding="utf-8")
            (building / "parts.pickle").write_bytes(pickle.dumps(dict(parts or {})))
        distributed.barrier()
        torch.save(_rng_state(), building / f"rng-{distributed.rank()}.pt")
        distributed.barrier()
        # The writers talk to each other from threads: in a group of their own, not between the trainer's messages.
        writing = dcp.async_save(
            _weights(policy), checkpoint_id=building / "weights", process_group=distributed.side_group()
        )
        self._writing = self._threads.submit(self._publish, writing, building, final)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises: RuntimeError that says what stopped it from being written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _publish(self, writing: Any, building: Path, final: Path) -> None:
        try:
            writing.result()  # on the main rank: everyone's part is written
        except CheckpointException as error:  # not an Exception, and its text is all ranks' tracebacks
            reason = next((wrapped[0] for wrapped in error.failures.values()), error)
            raise RuntimeError(f"{final} could not be written: {reason}") from error
        if distributed.is_main():
            shutil.rmtree(final, ignore_errors=True)
            building.rename(final)
            self._prune()

    def peek(self, path: Path) -> dict[str, Any]:
        """The facts about the run, with `step` and `schedule`, without loading any weights."""
        return json.loads((path / "state.json").read_text(encoding="utf-8"))

    def parts(self, path: Path) -> dict[str, Any]:
        """The states given to `save`.

        Raises: UserError for a checkpoint of a version of rlpost that kept them otherwise.
        """
        file = path / "parts.pickle"
        if not file.is_file():
            raise UserError(f"{path}: an earlier version of rlpost wrote it, which alone can go on with it")
        return pickle.loads(file.read_bytes())

    def load(self, path: Path, policy: Policy) -> dict[str, Any]:
        """Restore policy and random number generators in place. Returns: what was said about the run, and `step`."""
        loaded = _weights(policy)
        dcp.load(loaded, checkpoint_id=path / "weights")
        set_state_dict(
            policy.model,
            policy.optimizer.torch_optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=_options(policy),
        )
        if "reference" in loaded:
            assert isinstance(policy.reference, PolicyModel)
            set_model_state_dict(policy.reference, loaded["reference"])
        state = self.peek(path)
        policy.optimizer.load_state_dict(state.pop("schedule"))
        rng = path / f"rng-{distributed.rank()}.pt"
        if rng.is_file():  # another number of ranks than at the save has no state for the new ones
            _set_rng_state(torch.load(rng, weights_only=False))
        return state

    def _prune(self) -> None:
        if self._keep is None:
            return
        for old in sorted(self._directory.glob("step-*"))[: -self._keep]:
            # Renamed first: a half-deleted checkpoint must not look like one.
            doomed = old.rename(old.with_name(f".deleting-{old.name}"))
            shutil.rmtree(doomed, ignore_errors=True)


def _weights(policy: Policy) -> dict[str, Any]:
    """The trained part of the model, the optimizer, and the reference if it moves."""
    model, optimizer = get_state_dict(policy.model, policy.optimizer.torch_optimizer, options=_options(policy))
    if frozen := {name for name, p in policy.model.named_parameters(remove_duplicate=False) if not p.requires_grad}:
        model = {name: value for name, value in model.items() if name not in frozen}  # a tied head's second name too
    weights = {"model": model, "optimizer": optimizer}
    if policy.moves_reference and isinstance(policy.reference, PolicyModel):
        weights["reference"] = get_model_state_dict(policy.reference)
    return weights


def _options(policy: Policy) -> StateDictOptions:
    frozen = any(not parameter.requires_grad for parameter in policy.model.parameters())
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)


def _plain(value: Any) -> Any:
    """Scheduler states hold NumPy and tensor scalars."""
    return value.item()


def _rng_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
