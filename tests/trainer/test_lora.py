"""LoRA: what is trained, what engines and the reference see, and what a checkpoint holds."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.functional import linear

from rlpost.config.schema import KLConfig, LoRAConfig
from rlpost.errors import UserError
from rlpost.objective.objective import Objective
from rlpost.trainer import model as trainer_model
from rlpost.trainer.checkpoint import Checkpoints
from rlpost.trainer.lora import WithoutAdapters, add_adapters
from rlpost.trainer.optimizer import AdamW
from rlpost.trainer.policy import Policy
from tests.runs import rlpost, rows
from tests.trainer.test_policy import groups, policy_of, rollouts, sharded, weights

pytestmark = pytest.mark.usefixtures("process_group")
QUERY = "model.layers.0.self_attn.q_proj"


def make(directory: Path, seed: int = 0, targets: tuple[str, ...] = ()) -> Policy:
    torch.manual_seed(seed)
    model = trainer_model.load(directory)
    add_adapters(model, LoRAConfig(rank=4, alpha=8.0, targets=list(targets)))
    policy_model = sharded(model)
    objective = Objective(kl=KLConfig(coef=0.1))
    return policy_of(policy_model, objective, AdamW(lr=1e-2), WithoutAdapters(policy_model))


@pytest.fixture
def updated(tiny_dir: Path) -> Policy:
    policy = make(tiny_dir)
    made = rollouts()
    policy.update(made, groups(made), step=1)
    policy.update(made, groups(made), step=2)
    return policy


def test_adapters_start_at_nothing_and_are_all_that_is_trained(tiny_dir: Path) -> None:
    policy = make(tiny_dir)
    plain = dict(trainer_model.load(tiny_dir).named_parameters())
    before = weights(policy)
    assert before.keys() == plain.keys()
    assert all(torch.equal(before[name], weight) for name, weight in plain.items())
    made = rollouts()
    first = policy.update(made, groups(made), step=1)
    assert first["policy/kl_ref"] == 0
    assert first["policy/grad_norm"] > 0
    assert policy.update(made, groups(made), step=2)["policy/kl_ref"] > 0
    after = weights(policy)
    changed = {name for name, weight in plain.items() if not torch.equal(after[name], weight)}
    assert changed == {name for name in plain if "_proj" in name}
    base = dict(policy.model.named_parameters())
    assert torch.equal(base[f"language_model.{QUERY}.base_layer.weight"], plain[f"{QUERY}.weight"])


def test_merged_weights_are_the_base_and_the_adapters_product(updated: Policy) -> None:
    parts = dict(updated.model.language_model.named_parameters())
    a, b = (parts[f"{QUERY}.lora_{which}.default.weight"] for which in "AB")
    assert a.shape[0] == b.shape[1] == 4
    expected = parts[f"{QUERY}.base_layer.weight"] + 8.0 / 4 * b @ a
    torch.testing.assert_close(weights(updated)[f"{QUERY}.weight"], expected)
    x = torch.randn(3, a.shape[1])
    torch.testing.assert_close(updated.model.get_submodule(f"language_model.{QUERY}")(x), linear(x, expected))


def test_a_model_with_the_merged_weights_scores_alike(updated: Policy, tiny_dir: Path) -> None:
    made = rollouts()
    plain = trainer_model.load(tiny_dir)
    plain.load_state_dict(weights(updated), strict=False)
    theirs = policy_of(sharded(plain), Objective()).logprobs(made)
    ours, reference = updated.logprobs(made), updated.reference_logprobs(made)
    for i in range(len(made)):
        torch.testing.assert_close(ours[i], theirs[i], rtol=0, atol=1e-5)
    assert max((ours[i] - reference[i]).abs().max() for i in range(len(made))) > 1e-3


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on(updated: Policy, tiny_dir: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(updated, 2, {})
    checkpoints.finish()
    resumed = make(tiny_dir, seed=1)
    checkpoints.load(tmp_path / "step-000002", resumed)
    made = rollouts()
    assert updated.update(made, groups(made), step=3)["policy/kl_ref"] > 0
    resumed.update(made, groups(made), step=3)
    expected = weights(updated)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())
    saved = FileSystemReader(tmp_path / "step-000002/weights").read_metadata().state_dict_metadata
    trained = [name for name, parameter in updated.model.named_parameters() if parameter.requires_grad]
    assert sorted(name for name in saved if name.startswith("model.")) == sorted(f"model.{name}" for name in trained)
    moments = [name for name in saved if name.endswith(".exp_avg")]
    assert sorted(moments) == sorted(f"optimizer.state.{name}.exp_avg" for name in trained)


def test_only_some_layers_and_none_that_are_not_linear(tiny_dir: Path) -> None:
    trained = [n for n, p in make(tiny_dir, targets=("q_proj",)).model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".q_proj.lora_" in name for name in trained)
    with pytest.raises(UserError, match=r"trainer.lora.targets=\['query'\]: .*query"):
        make(tiny_dir, targets=("query",))
    with pytest.raises(UserError, match=r"model.embed_tokens is not a linear layer"):
        make(tiny_dir, targets=("embed_tokens",))


@pytest.mark.slow
def test_a_run_samples_with_its_adapters(tmp_path: Path) -> None:
    lora = ["trainer.lora.rank=4", "algorithm.kl.measure=true", "optimizer.lr=0.01", "tracking=none"]
    rlpost(tmp_path, "experiment=debug", "reward.format.pattern='[0-9]'", *lora, "run_dir=run")
    first, *_, last = rows(tmp_path / "run")
    assert first["policy/kl_ref"] == 0
    assert last["policy/kl_ref"] > 1e-4
    assert all(row["rollout/logprob_diff_max"] < 1e-3 for row in rows(tmp_path / "run"))
