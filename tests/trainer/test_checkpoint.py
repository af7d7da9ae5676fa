"""Checkpoints: whole or not there, everything restored, old ones pruned."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlpost import distributed
from rlpost.config.schema import KLConfig
from rlpost.objective.objective import Objective
from rlpost.trainer import model as trainer_model
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.policy import Policy
from tests.trainer.test_policy import groups, make_policy, rollouts, sharded, weights

pytestmark = pytest.mark.usefixtures("process_group")


def with_reference(tiny_dir: Path) -> Policy:
    reference = sharded(trainer_model.load(tiny_dir))
    return make_policy(tiny_dir, reference=reference, objective=Objective(kl=KLConfig(coef=0.1, reference_every=1)))


def reference_weights(policy: Policy) -> list[torch.Tensor]:
    return [distributed.full(p.detach()).clone() for p in policy.reference.parameters()]


def test_a_restored_policy_goes_on_bit_for_bit(tiny_dir: Path, tmp_path: Path) -> None:
    made = rollouts()
    policy = with_reference(tiny_dir)
    policy.update(made, groups(made), step=1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(policy, 1, {"stream": {"position": 4}})
    states = torch.rand(2), np.random.rand(2), random.random()
    expected = policy.update(made, groups(made), step=2)
    expected.pop("train/tokens_per_s")
    after = weights(policy), reference_weights(policy)

    checkpoints.finish()  # what was saved is the state before that update, whenever it was written
    restored = with_reference(tiny_dir)
    state = checkpoints.load(checkpoints.latest(), restored)
    assert state == {"step": 1, "stream": {"position": 4}}
    again = torch.rand(2), np.random.rand(2), random.random()
    assert torch.equal(again[0], states[0])
    assert (again[1] == states[1]).all()
    assert again[2] == states[2]
    metrics = restored.update(made, groups(made), step=2)
    metrics.pop("train/tokens_per_s")
    assert metrics == expected
    assert all(torch.equal(w, after[0][n]) for n, w in weights(restored).items())
    assert all(torch.equal(a, b) for a, b in zip(reference_weights(restored), after[1], strict=True))
    assert restored.optimizer.state_dict()["last_epoch"] == policy.optimizer.state_dict()["last_epoch"] == 2


def test_a_reference_that_stays_is_not_saved(tiny_dir: Path, tmp_path: Path) -> None:
    reference = sharded(trainer_model.load(tiny_dir))
    staying = make_policy(tiny_dir, reference=reference, objective=Objective(kl=KLConfig(coef=0.1)))
    sizes = []
    for step, policy in enumerate((staying, with_reference(tiny_dir)), start=1):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(policy, step, {})
        checkpoints.finish()
        sizes.append(sum(f.stat().st_size for f in (tmp_path / f"step-{step:06d}" / "weights").iterdir()))
    assert sizes[1] > 1.2 * sizes[0]


def test_old_ones_are_pruned_and_half_written_ones_do_not_count(tiny_dir: Path, tmp_path: Path) -> None:
    policy = make_policy(tiny_dir)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    (tmp_path / ".writing-000009" / "weights").mkdir(parents=True)
    assert checkpoints.latest() is None
    for step in (1, 2, 10):
        checkpoints.save(policy, step, {})
    checkpoints.finish()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000010"]
    assert checkpoints.latest() == tmp_path / "step-000010"
    assert checkpoints.peek(checkpoints.latest())["step"] == 10
    keeping = Checkpoints(tmp_path, keep=None)
    keeping.save(policy, 11, {})
    keeping.finish()
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_a_step_saved_again_replaces_itself(tiny_dir: Path, tmp_path: Path) -> None:
    policy = make_policy(tiny_dir)
    checkpoints = Checkpoints(tmp_path)
    for tokens in (1, 2):
        checkpoints.save(policy, 5, {"tokens": tokens})
    checkpoints.finish()
    assert checkpoints.load(checkpoints.latest(), policy)["tokens"] == 2


def test_a_checkpoint_that_cannot_be_written_is_not_passed_over(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one, or the end of the run, raises what stopped it; nothing half-written has a checkpoint's name."""

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", full)
        checkpoints.save(make_policy(tiny_dir), 1, {})
        with pytest.raises(RuntimeError, match=r"step-000001 could not be written: .*No space left on device"):
            checkpoints.finish()
    assert checkpoints.latest() is None
