"""The cost model against the real objects, published numbers, and numbers worked out by hand."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.common import synthetic
from rlpost import distributed
from rlpost.commands import plan
from rlpost.config.schema import TrainerConfig
from rlpost.data.packing import attention_mask, pack
from rlpost.errors import UserError
from rlpost.objective import logprobs
from rlpost.objective.logprobs import SamplingDistribution
from rlpost.planning import estimate
from rlpost.planning.costs import CHUNK_ENTRIES, KEPT_ENTRIES, MODELS, Batch, Shape
from rlpost.planning.estimate import Setting
from rlpost.planning.hardware import Machine
from rlpost.trainer import model as trainer_model
from rlpost.trainer.optimizer import AdamW

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
# h=8, L=2, a=2, k=1, d=4, f=16, V=100: B = 2*8*4*(2+1) + 3*8*16 = 576, a block 576 + 16 = 592, the root 800 + 8.
SMALL = Shape(8, 2, 2, 1, 4, 16, 100, tied=True, block_extra=16, block_tensors=9)
MACHINE = Machine(
    memory=1e6,
    flops=1e6,
    engine_flops=2e8,
    bandwidth=1e6,
    link=1e5,
    network=1e4,
    products_share=0.5,
    bandwidth_share=0.5,
    hop=0.0,
    engine_step=0.01,
    reserve=0.0,
    per_node=4,
)
SETTING = Setting(
    shape=SMALL,
    gpus=8,
    batch=Batch(groups=2, samples=4, prompt=10, completion=5, budget=60),
    optimizer_steps=1,
    epochs=1,
    longest=20,
    width=2,
    checkpointing=False,
    scorings=0,
    reference_scorings=0,
    idle_share=0.0,
    engine_width=2,
    max_num_seqs=4,
    block_size=4,
    memory_share=0.5,
    cache=None,
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
    ],
)
def test_known_shapes_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert Shape.from_config(MODELS[name], name).parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=24),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        MistralConfig(**SIZES),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, tie_word_embeddings=True),
    ],
    ids=["llama", "llama tied", "llama with biases", "mistral", "qwen2", "qwen3"],
)
def test_parameters_are_those_of_the_real_model(config: PreTrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    shape = plan.shape_of(OmegaConf.create(), str(tmp_path / "config.json"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == model.num_parameters()
    assert shape.tensors == len(list(model.parameters()))


def test_blocks_of_the_head_are_the_objectives() -> None:
    assert (CHUNK_ENTRIES, KEPT_ENTRIES) == (logprobs.CHUNK_ENTRIES, logprobs.KEPT_ENTRIES)


@pytest.mark.parametrize(("budget", "apart"), [(2048, False), (150, False), (90, False), (30, False), (100, True)])
def test_batches_are_packed_as_counted(budget: int, apart: bool) -> None:
    batch = Batch(4, 4, prompt=24, completion=20, budget=budget, apart=apart)
    packed = pack(synthetic(4, 4, 24, 20, 259), [True] * 16, budget, "padded" if apart else "shared_prefix")
    assert len(packed) == batch.micro_batches
    assert sum(b.num_positions for b in packed) == batch.positions
    assert sum(int(attention_mask(b).sum()) for b in packed) == batch.pairs


def tiny_shape(directory: Path) -> Shape:
    return Shape.from_config(json.loads((directory / "config.json").read_text()), "tiny")


@pytest.mark.usefixtures("process_group")
def test_weights_gradients_and_moments_are_those_of_the_real_objects(tiny_dir: Path) -> None:
    policy_model = policy_model_of(trainer_model.load(tiny_dir))
    optimizer = AdamW(lr=1e-6)(policy_model.parameters(), 1)
    (packed,) = pack(synthetic(2, 2, 8, 8, 259), [True] * 4, 2048)
    policy_model(packed)[0].sum().backward()
    optimizer.step()
    parameters = list(policy_model.parameters())
    moments = [state[name] for state in optimizer.torch_optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    alone = replace(SETTING, shape=tiny_shape(tiny_dir), gpus=1)
    expected = {item.name: item.size for item in estimate.trainer_memory(alone)}
    assert expected["weights, float32"] == sum(p.nbytes for p in parameters)
    assert expected["gradients, float32"] == sum(p.grad.nbytes for p in parameters)
    assert expected["AdamW's moments, float32"] == sum(m.nbytes for m in moments)


def policy_model_of(model: torch.nn.Module, checkpointing: bool = False) -> trainer_model.PolicyModel:
    trainer = TrainerConfig(activation_checkpointing=checkpointing)
    return trainer_model.shard(model, SamplingDistribution(), distributed.sharding_mesh(), trainer)


def addmm_flops(added: Any, a: torch.Size, b: torch.Size, out_shape: torch.Size, **unused: Any) -> int:
    """In place, which PyTorch does not count: a [M, K], b [K, N]."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_are_those_that_pytorch_counts(tiny_dir: Path, checkpointing: bool) -> None:
    """All but attention's, which PyTorch does not count on CPUs. In float64, which goes by no kernel of its own."""
    shape, batch = tiny_shape(tiny_dir), Batch(4, 4, 24, 20, 2048)
    policy_model = policy_model_of(trainer_model.load(tiny_dir).double(), checkpointing)
    (packed,) = pack(synthetic(4, 4, 24, 20, 259), [True] * 16, 2048)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as counter:
        scored, _ = policy_model(packed)
        forward = counter.get_total_flops()
        scored.sum().backward()
    attention = shape.attention(batch.pairs)
    mean_logits = 2 * 259 * batch.tokens  # of the entropy
    assert forward - mean_logits == batch.forward(shape) - attention
    assert (
        counter.get_total_flops() - mean_logits == batch.update(shape, checkpointing) - (3 + checkpointing) * attention
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(tiny_dir: Path, dtype: torch.dtype) -> None:
    model = trainer_model.load(tiny_dir, "padded").to(dtype)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            saved[place] = tensor
        return tensor

    ids = torch.arange(3, 131).expand(4, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    shape, width = tiny_shape(tiny_dir), dtype.itemsize
    expected = ids.numel() * (shape.layers * shape.saved_bytes(width) + shape.norm_bytes(width))
    assert sum(t.untyped_storage().nbytes() for t in saved.values()) == pytest.approx(expected, rel=0.02)


def test_pickled_rollouts_are_as_large_as_counted() -> None:
    rollouts = synthetic(4, 4, 64, 512, vocabulary=128256)
    for number, rollout in enumerate(rollouts):
        rollout.completion = replace(rollout.completion, text=f"{number:04}" * 512)
    assert len(pickle.dumps(rollouts)) / (16 * 512) == pytest.approx(estimate.PICKLED, rel=0.1)


def test_memory_by_hand() -> None:
    sizes = [item.size for item in estimate.trainer_memory(SETTING)]
    shard = 4 * (2 * 592 + 808) / 8
    whole = 2 * (808 + 2 * 592)
    reducing = 2 * 800 + 6 * 592
    # A block and position: norms 2 * (4 + 4) * 8, attention 2 * (4 + 2) * 4 + 8, the gated layer 8 * 16; 60 positions.
    kept = 60 * (2 * (128 + 48 + 8 + 128) + 64)
    assert sizes == [shard, shard, 2 * shard, whole, reducing, kept, 4 * 4 * 6000, 6 * 808]
    assert estimate.trainer_peak(SETTING) == sum(sizes[:-1])
    fewer = replace(SETTING, batch=replace(SETTING.batch, budget=1), longest=1, shape=replace(SMALL, layers=1))
    assert estimate.trainer_peak(replace(fewer, shape=replace(fewer.shape, vocabulary=10**7))) == (
        16 * (592 + 8e7 + 8) / 8 + 2 * (8e7 + 8 + 2 * 592) + max(16e7 + 6 * 592 + 312 + 64 + 16e7, 6 * (8e7 + 8))
    )
    with_reference = estimate.trainer_memory(replace(SETTING, reference_scorings=1))
    assert estimate.total(with_reference) - sum(sizes) == shard
    # Sixteen positions of eight bytes a block are kept with checkpointing, and one block's activations.
    checkpointed = {item.name: item.size for item in estimate.trainer_memory(replace(SETTING, checkpointing=True))}
    assert checkpointed["activations of a micro-batch"] == 60 * (2 * 16 + 312 + 64)
    halved = {item.name: item.size for item in estimate.trainer_memory(replace(SETTING, context_parallel=2))}
    assert halved["activations of a micro-batch"] == kept / 2
    assert estimate.trainer_memory(replace(SETTING, replicas=4))[0].size == 4 * shard

    engine = [item.size for item in estimate.engine_memory(SETTING, MACHINE)]
    assert engine == [2 * 1992, 4 * 20 * 32, 0.5e6 - 2 * 1992]  # a token: 2 layers, keys and values, one head of 4
    halves = [item.size for item in estimate.engine_memory(replace(SETTING, tensor_parallel=2), MACHINE)]
    assert halves[:2] == [1992, 4 * 20 * 32]  # the one head is held twice


def test_collectives_by_hand() -> None:
    assert MACHINE.gather(4e5, 1) == 0
    assert MACHINE.gather(4e5, 4) == pytest.approx(3)  # 3/4 of it at 1e5
    assert MACHINE.gather(4e5, 8) == pytest.approx(5)  # 4 nodes' cards bring half of it at 1e4 each
    assert replace(MACHINE, hop=0.1).gather(4e5, 8, collectives=2) == pytest.approx(5 + 2 * 7 * 0.1)
    assert MACHINE.sum_replicas(1e4, 2, 4) == pytest.approx(1)
    assert MACHINE.sum_replicas(1e4, 2, 2) == pytest.approx(0.1)  # both on one node
    assert MACHINE.exchange(1e4, 1, 5) == 0
    assert MACHINE.exchange(1e4, 2, 5) == pytest.approx(0.1)
    assert replace(MACHINE, hop=0.1).exchange(1e4, 8, 5) == pytest.approx(1.75 + 2 * 5 * 0.1)  # over the network


def test_phases_by_hand() -> None:
    found = {phase.name: phase for phase in estimate.phases(SETTING, MACHINE)}
    # Of each prompt the first 8 of 10 tokens are two whole blocks; three samples of four compute the last two again.
    prompts = 2 * (10 + 3 * 2)
    assert found["rollout, prompts"].flops == 2 * (2 * 576 * prompts + 800 * 8) + 4 * 2 * 8 * 2 * 55
    # Eight sequences, four at a time, five tokens each: ten steps, which read the weights, and keys of 12.5 tokens.
    completions = found["rollout, completions"]
    assert completions.memory_bytes == 10 * (2 * (2 * 592 + 800) + 4 * 12.5 * 32)
    assert completions.seconds == pytest.approx(completions.memory_bytes / 5e5 + 10 * 0.01)
    # 60 positions, 40 tokens; a prompt of 10 has 55 pairs, a completion 50 + 15 of them.
    forward = 2 * (2 * 576 * 60 + 800 * 40) + 4 * 2 * 8 * (2 * 55 + 8 * 65)
    update = found["update, forward and backward"]
    assert update.flops == 3 * forward
    gathered, reduced = 2 * 1992 + 2 * 2 * 592, 4 * 1992
    assert update.link_bytes == (gathered + reduced) * 7 / 8
    assert found["optimizer"].memory_bytes == 1992 / 8 * 40
    sync = found["weight sync"]
    assert (sync.link_bytes, sync.memory_bytes) == (4 * 1992 * 7 / 8, 1992 * (4 + 4 + 2))

    half = {phase.name: phase for phase in estimate.phases(replace(SETTING, idle_share=0.5), MACHINE)}
    assert half["update, forward and backward"].flops == 2 * forward
    more = {phase.name: phase for phase in estimate.phases(replace(SETTING, reference_scorings=2, scorings=1), MACHINE)}
    assert more["log-probabilities before"].flops == forward
    assert more["log-probabilities of the reference"].flops == 2 * forward
    assert more["log-probabilities before"].link_bytes == 2 * 1992 * 7 / 8
    twice = {phase.name: phase for phase in estimate.phases(replace(SETTING, optimizer_steps=2, epochs=2), MACHINE)}
    assert twice["update, forward and backward"].flops == 6 * forward
    assert twice["rollout, prompts"] == found["rollout, prompts"]
    # Two replicas of four: all but the sums stays on the node.
    hybrid = {phase.name: phase for phase in estimate.phases(replace(SETTING, replicas=2), MACHINE)}
    assert hybrid["update, forward and backward"].link_bytes == (gathered + reduced) * 3 / 4 + reduced / 4
    # Twice in each of two blocks the two ranks of an engine sum four sequences' 8 entries of two bytes, in each of 20 steps.
    halves = {phase.name: phase for phase in estimate.phases(replace(SETTING, tensor_parallel=2), MACHINE)}
    both = halves["rollout, completions"]
    assert both.link_bytes == 20 * 4 * (4 * 8 * 2)
    assert both.seconds == pytest.approx(both.memory_bytes / 5e5 + both.link_bytes / 1e5 + 20 * 0.01)
    # Queries, keys, values and outputs of 24 entries a block for half of the positions, half of it sent, twice.
    split = {phase.name: phase for phase in estimate.phases(replace(SETTING, context_parallel=2), MACHINE)}
    assert split["update, forward and backward"].link_bytes - update.link_bytes == 2 * 2 * 2 * 24 * 30 / 2


def test_what_does_not_fit_is_said() -> None:
    assert estimate.why_not(SETTING, MACHINE) == []
    assert "trainer and engine together" in estimate.why_not(SETTING, replace(MACHINE, memory=7900.0, reserve=10.0))[-1]
    (engine,) = estimate.why_not(replace(SETTING, memory_share=0.0045), MACHINE)
    assert "not one sequence of 20 tokens" in engine
    assert estimate.concurrent(replace(SETTING, memory_share=0.0045), MACHINE) == 1  # (4500 - 3984) / (15 * 32)


GPU = ["--gpu", "h100-80gb"]


def test_a_configuration_becomes_a_setting() -> None:
    overrides = [
        *("trainer.precision=bfloat16", "rollout.max_logprob_diff=null", "prompts_per_step=16", "samples_per_prompt=4"),
        *("algorithm.num_mini_batches=2", "algorithm.num_epochs=3", "algorithm.kl.coef=0.1", "rollout.max_tokens=64"),
    ]
    command = ["--gpus", "4", *GPU, *overrides, "--model", "qwen2.5-7b", "--completion-tokens", "32"]
    _, s, machine = plan.planned(command)
    assert s.batch == Batch(groups=2, samples=4, prompt=256, completion=32, budget=2048)
    assert (s.optimizer_steps, s.epochs, s.scorings, s.reference_scorings, s.groups) == (6, 3, 1, 1, 16)
    assert (s.width, s.engine_width, s.longest, s.shards, s.memory_share) == (2, 2, 320, 4, 0.4)
    assert (machine.flops, machine.memory, machine.hop) == (989e12, 80e9, 3e-6)
    in_reward = ["algorithm.kl.coef=0.1", "algorithm.kl.place=reward", "model=tiny"]
    _, s, _ = plan.planned(["--gpus", "1", *GPU, *in_reward])
    assert (s.scorings, s.reference_scorings) == (1, 2)
    _, s, machine = plan.planned(["--gpus", "1", *GPU, "--peak-tflops", "7", "model=tiny"])
    assert (s.width, s.scorings, s.reference_scorings, machine.flops) == (4, 0, 0, 7e12)


def test_ranks_that_share_positions_or_repeat_parameters() -> None:
    arguments = plan.parser().parse_args(["--gpus", "16", *GPU])
    cfg = plan.composed(["prompts_per_step=16"], 16, None)
    cfg.trainer.context_parallel, cfg.trainer.replicas = 2, 4
    s = plan.setting_of(cfg, SMALL, arguments)
    assert (s.context_parallel, s.replicas, s.shards, s.batch.groups, s.groups) == (2, 4, 4, 2, 16)
    cfg.trainer.replicas = 3
    with pytest.raises(UserError, match=r"trainer\.replicas=3 does not divide --gpus 16"):
        plan.setting_of(cfg, SMALL, arguments)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--gpu", "cpu"], "--gpu cpu: --memory-gb is missing"),
        ([*GPU, "reducer=nope"], "reducer=nope: there is no such choice"),
        ([*GPU, "steps=x"], "steps=x: expected a whole number"),
        ([*GPU, "model=qwen2.5-7b"], "is not on this machine; give its config.json as --model"),
        ([*GPU, "model=tiny_vision"], "model_type=idefics3 is not modelled"),
        ([*GPU, "--model", "llama-3.1-9b"], "did you mean 'llama-3.1-8b'"),
        ([*GPU, "--completion-tokens", "99"], r"--completion-tokens 99: expected 1\.\.32"),
        ([*GPU, "--idle-groups", "0.5", "algorithm.kl.coef=0.1"], "every group has a backward pass"),
        ([*GPU, "--mfu", "0"], "--mfu 0.0: expected a number over 0"),
        ([*GPU, "--model", "llama-3.1-8b", "rollout.max_tokens=200000"], "over the model's context of 131072"),
        ([*GPU, "--gpus", "3"], "does not divide over the cluster's 3 processes"),
    ],
)
def test_mistakes_are_one_line(command: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        plan.planned(["--gpus", "1", *command])
    assert "\n" not in str(error.value)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlpost.commands.plan", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_command() -> None:
    command = ["--gpus", "8", *GPU, "--model", "llama-3.1-70b"]
    shown = run(*command)
    assert shown.returncode == 0, shown.stderr
    assert "starting takes 2258 GB of a node's own memory" in shown.stdout  # eight times 4 bytes of 70.55e9
    assert (
        len(
            {
                len(line)
                for line in shown.stdout.splitlines()
                if line.startswith(("a step of", "  update", "  together"))
            }
        )
        == 1
    )
    answer: dict[str, Any] = json.loads(run(*command, "--json").stdout)
    assert (answer["parameters"], answer["fits"]) == (70_553_706_496, False)
    assert answer["seconds"] == pytest.approx(sum(phase["seconds"] for phase in answer["phases"]))
    wrong = run(*command, "stepz=1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "rlpost-plan: stepz: there is no such setting; did you mean 'steps'?\n"


def test_an_engine_over_several_gpus() -> None:
    shared = ["rollout.engine.tensor_parallel=4", "trainer.micro_batch_tokens=512"]
    command = ["--gpus", "8", *GPU, "--model", "qwen2.5-7b"]
    _, setting, machine = plan.planned([*command, *shared])
    assert setting.tensor_parallel == 4
    assert plan.text("", setting, machine).endswith("\nit fits")
    with pytest.raises(UserError, match=r"tensor_parallel=8 does not divide the model's 28 heads"):
        plan.planned([*command, "rollout.engine.tensor_parallel=8"])
    with pytest.raises(UserError, match=r"rollout.engine.tensor_parallel=3 does not divide the cluster's 8 processes"):
        plan.planned([*command, "rollout.engine.tensor_parallel=3"])


def test_the_command_loads_no_heavy_module() -> None:
    script = (
        "import sys; from rlpost.commands.plan import planned; "
        "planned(['--gpus', '1', '--gpu', 'h100-80gb', '--model', 'llama-3.1-8b']); "
        "print(sorted({'torch', 'vllm', 'transformers', 'mlflow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("left_out", ["trainer.lora.rank=8", "trainer.cpu_offload=true", "rollout=vllm_server"])
def test_what_the_model_of_costs_leaves_out_is_refused(left_out: str) -> None:
    with pytest.raises(UserError, match="rlpost-plan knows whole models on GPUs that also sample, not this"):
        plan.planned(["--gpus", "1", *GPU, "--model", "llama-3.1-8b", left_out])
