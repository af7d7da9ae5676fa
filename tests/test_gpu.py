"""What a GPU does by other means than a CPU: each against the CPU's way, or against itself without the setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlpost import distributed
from rlpost.config.schema import TrainerConfig
from rlpost.data.packing import pack
from rlpost.models.tiny import TinyLlama
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.objective.objective import Objective
from rlpost.rollout.engine import Sampling
from rlpost.trainer import attention
from rlpost.trainer import model as trainer_model
from rlpost.trainer.policy import Policy, to_device
from rlpost.types import Example, Prompt
from tests.runs import TINY, rlpost, rows
from tests.trainer.test_policy import groups, policy_of, rollouts, weights

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
# FlexAttention's kernels want heads of at least 16.
HEADS = TinyLlama(num_heads=4, num_kv_heads=2)


def make(layout: str = "shared_prefix", precision: str = "float32", cpu_offload: bool = False) -> Policy:
    model = trainer_model.load(HEADS.directory(), layout)
    mesh = distributed.sharding_mesh()
    policy_model = trainer_model.shard(
        model, SamplingDistribution(), mesh, TrainerConfig(precision=precision, cpu_offload=cpu_offload)
    )
    return policy_of(policy_model, Objective())


def test_flex_attention_scores_packed_rows_like_padded_ones(process_group: None) -> None:
    packed, padded = make(), make("padded")
    assert packed.model.language_model.config._attn_implementation == attention.FLEX
    made = rollouts()
    ours, theirs = packed.logprobs(made), padded.logprobs(made)
    for i in range(len(made)):
        torch.testing.assert_close(ours[i], theirs[i], rtol=0, atol=1e-4)
    first, second = (policy.update(made, groups(made), step=1) for policy in (packed, padded))
    assert first["policy/grad_norm"] == pytest.approx(second["policy/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offloaded_weights_are_trained_alike(process_group: None, precision: str) -> None:
    plain, offloaded = make(precision=precision), make(precision=precision, cpu_offload=True)
    assert {p.device.type for p in offloaded.model.parameters()} == {"cpu"}
    made = rollouts()
    for policy in (plain, offloaded):
        policy.update(made, groups(made), step=1)
    expected = weights(plain)
    for name, weight in weights(offloaded).items():
        torch.testing.assert_close(weight.cpu(), expected[name].cpu(), rtol=0, atol=1e-5)


def test_an_engine_that_sleeps_gives_memory_up_and_samples_alike(tiny_end_tokens: tuple[int, ...]) -> None:
    from rlpost.rollout.vllm import VLLMEngine

    prompts = [Prompt(Example((), None), (5, 6, 7 + i), "") for i in range(4)]
    engine = VLLMEngine(HEADS.directory(), tiny_end_tokens, 64, gpu_memory_utilization=0.1, sleep=True)
    try:
        sampling = Sampling(max_tokens=8)
        before = dict(engine.generate(prompts, range(4), sampling))
        free, _ = torch.cuda.mem_get_info()
        again = dict(engine.generate(prompts, range(4), sampling))
        assert again == before
        engine._wake("weights", "kv_cache")
        awake, total = torch.cuda.mem_get_info()
        assert free - awake > 0.05 * total
    finally:
        engine.close()


@pytest.mark.parametrize("settings", [[], ["trainer.precision=bfloat16", "rollout.max_logprob_diff=null"]])
def test_a_run_on_a_gpu(tmp_path: Path, settings: list[str]) -> None:
    model = ["+model.num_heads=4", "+model.num_kv_heads=2", "rollout.engine.sleep=true"]
    rlpost(tmp_path, *TINY, "cluster=gpu", *model, *settings, "tracking=none", "run_dir=run")
    assert len(rows(tmp_path / "run")) == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "setting", ["trainer.context_parallel=2", "trainer.replicas=2", "rollout.engine.tensor_parallel=2"]
)
def test_two_gpus_train_like_one(tmp_path: Path, setting: str) -> None:
    common = [*TINY, "+model.num_heads=4", "+model.num_kv_heads=2", "tracking=none"]
    rlpost(tmp_path, *common, "cluster=gpu", "run_dir=one")
    rlpost(tmp_path, *common, "cluster=node", "cluster.num_processes=2", setting, "run_dir=two")
    for two, one in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert two["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_go_from_gpu_to_gpu(tmp_path: Path) -> None:
    store = distributed.Link.store(60)
    receiver = (
        "import torch; from rlpost.distributed import Link\n"
        f"link = Link('127.0.0.1', {store.port}, 1, 2, 60)\n"
        f"torch.save(dict(link.receive()), {str(tmp_path / 'received')!r})"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    process = subprocess.Popen([sys.executable, "-c", receiver], env=environment)
    link = distributed.Link("", store.port, 0, 2, 60, store)
    sent = {"a": torch.arange(5.0, device="cuda"), "b": torch.ones(3, 4, dtype=torch.bfloat16)}
    link.send(sent.items())
    assert process.wait(60) == 0
    received = torch.load(tmp_path / "received")
    assert {name: (t.dtype, t.tolist()) for name, t in received.items()} == {
        name: (t.dtype, t.tolist()) for name, t in sent.items()
    }
    link.close()


def test_a_packed_batch_comes_to_the_gpu_whole(process_group: None) -> None:
    (batch,) = pack(rollouts(num_groups=1), [True] * 3, 1000)
    moved = to_device(batch)
    assert moved.input_ids.is_cuda
    assert moved.advantages.is_cuda
