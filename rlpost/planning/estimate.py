"""The costs of a configuration on so many GPUs: memory, traffic and seconds, from the counts in costs.py.

docs/scaling.md has every formula and says which terms are exact, which are bounds and which are estimates. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlpost.planning.costs import CHUNK_ENTRIES, KEPT_ENTRIES, Batch, Shape
from rlpost.planning.hardware import Machine

Kind = Literal["exact", "bound", "estimate"]
MASTER = 4  # bytes of a weight, a gradient and each of AdamW's two moments: float32
PICKLED = 18  # bytes of a completion token: its id (over 65535), its log-probability, four letters of text


@dataclass(frozen=True)
class Setting:
    """A configuration in plain numbers. `batch` is one optimizer step's share of a data rank."""

    shape: Shape
    gpus: int
    batch: Batch
    optimizer_steps: int  # of a rollout batch: mini-batches x epochs
    epochs: int
    longest: int  # tokens of the longest prompt and completion allowed
    width: int  # bytes of the compute dtype
    checkpointing: bool
    scorings: int  # passes over a rollout batch for the policy's log-probabilities before the update
    reference_scorings: int  # the same of a reference model; 0: there is none
    idle_share: float  # of the groups, without a backward pass
    engine_width: int  # bytes of the engine's dtype
    max_num_seqs: int
    block_size: int | None  # tokens of the engine's shared blocks; None: it shares none
    memory_share: float | None  # of a GPU's memory, the engine's own
    cache: float | None  # bytes of its keys and values, where it has no such share; both None: what it needs
    replicas: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1

    @property
    def shards(self) -> int:
        """S: ranks that the parameters are split over."""
        return self.gpus // self.replicas

    @property
    def alone(self) -> bool:
        return self.gpus == 1

    @property
    def groups(self) -> int:
        """Of a step over all ranks."""
        return self.batch.groups * self.gpus // self.context_parallel * self.optimizer_steps // self.epochs


@dataclass(frozen=True)
class Item:
    """A line of the memory table: bytes a GPU holds."""

    name: str
    size: float
    kind: Kind


@dataclass(frozen=True)
class Phase:
    """A line of the phase table, of one GPU and one step."""

    name: str
    flops: float
    memory_bytes: float
    link_bytes: float
    products_s: float
    memory_s: float
    link_s: float
    seconds: float


def trainer_memory(s: Setting) -> list[Item]:
    """The memory of a rank while it updates; not all of it is held at once."""
    return [item for moment in _trainer_moments(s) for item in moment]


def trainer_peak(s: Setting) -> float:
    """Bytes at the most, as the backward pass begins or as it ends."""
    always, begins, ends = map(total, _trainer_moments(s))
    return always + max(begins, ends)


def _trainer_moments(s: Setting) -> tuple[list[Item], list[Item], list[Item]]:
    """Held all the time, as the backward pass begins, and as it ends."""
    shape, width, shard = s.shape, s.width, MASTER * s.shape.parameters / s.shards
    items = [
        Item("weights, float32", shard, "exact"),
        Item("gradients, float32", shard, "exact"),
        Item("AdamW's moments, float32", 2 * shard, "exact"),
    ]
    if s.reference_scorings:
        items.append(Item("reference model, float32", shard, "exact"))
    block, root = shape.block_parameters, shape.root_parameters
    if s.alone and width == MASTER:  # not wrapped: the head's new gradient stands beside the sum
        whole, early, late = 0, MASTER * shape.head_weights, 0
    elif s.alone:  # kept whole between micro-batches, gradients summed in float32
        whole, early, late = width * shape.parameters, MASTER * shape.parameters, 0
    else:  # the root stays whole during a pass, of the blocks this one and the next; gradients go out in float32
        whole = width * (root + 2 * block)
        early, late = width * shape.head_weights + (width + MASTER) * block, (width + MASTER) * root
    positions = max(s.batch.budget, s.longest) / s.context_parallel
    a_block = positions * shape.saved_bytes(width)
    inputs = positions * width * shape.hidden
    kept = positions * shape.norm_bytes(width)
    kept += shape.layers * inputs + a_block if s.checkpointing else shape.layers * a_block
    entries = positions * shape.vocabulary
    head = 4 * (min(entries, KEPT_ENTRIES) + 3 * min(entries, max(CHUNK_ENTRIES, shape.vocabulary)))
    begins = [
        Item("gradients before they are reduced", early, "estimate"),
        Item("activations of a micro-batch", kept, "estimate"),
        Item("head's probabilities and chunks", head, "bound"),
    ]
    ends = [Item("or, as the pass ends, the root's gradients", late, "estimate")] if late else []
    return [*items, Item("parameters gathered whole", whole, "estimate")], begins, ends


def total(items: Sequence[Item]) -> float:
    return sum(item.size for item in items)


def engine_memory(s: Setting, machine: Machine) -> list[Item]:
    """The memory that the engine beside the trainer holds, or wants to hold, of a GPU."""
    room = kv_room(s, machine)
    items = [Item("weights, the engine's copy", s.engine_width * s.shape.parameters / s.tensor_parallel, "exact")]
    wanted = min(s.max_num_seqs, sequences(s)) * s.longest * kv_token(s)
    items.append(Item("keys and values, all sequences at full length", wanted, "bound"))
    if room is not None:
        items.append(Item("room for keys and values", max(0.0, room), "estimate"))
    return items


def kv_token(s: Setting) -> float:
    """Bytes of a token's keys and values on a GPU. Heads that do not divide are held twice."""
    return s.shape.kv_bytes(s.engine_width) / min(s.tensor_parallel, s.shape.kv_heads)


def kv_room(s: Setting, machine: Machine) -> float | None:
    """Bytes for keys and values: what is set aside for them, or what weights leave of the engine's share; None: as many
    as needed.
    """
    if s.memory_share is None:
        return s.cache
    return s.memory_share * machine.memory - s.engine_width * s.shape.parameters / s.tensor_parallel


def sequences(s: Setting) -> int:
    """Completions that an engine samples in a step."""
    return math.ceil(s.groups * s.batch.samples * s.tensor_parallel / s.gpus)


def concurrent(s: Setting, machine: Machine) -> int:
    """Completions decoded together: the least of those asked for, sampled, and cached at their mean length."""
    most = min(s.max_num_seqs, sequences(s))
    room = kv_room(s, machine)
    if room is None:
        return most
    return max(0, min(most, int(room // (kv_token(s) * (s.batch.prompt + s.batch.completion)))))


def loading(s: Setting, machine: Machine) -> float:
    """Bytes of a node's own memory as a run starts: each rank loads the whole model in float32 before it is sharded."""
    return MASTER * s.shape.parameters * min(s.gpus, machine.per_node)


def why_not(s: Setting, machine: Machine) -> list[str]:
    """The parts that do not fit, in words; empty if everything does."""
    gb = 1e9
    room = machine.memory - machine.reserve
    problems = []
    trainer = trainer_peak(s)
    weights, wanted = (item.size for item in engine_memory(s, machine)[:2])
    cache = kv_room(s, machine)
    engine = weights + (wanted if cache is None else cache)
    if cache is not None and cache < s.longest * kv_token(s):
        problems.append(
            f"the engine's weights, {weights / gb:.1f} GB, leave {max(0.0, cache) / gb:.1f} of its {engine / gb:.1f} GB "
            f"for keys and values: not one sequence of {s.longest} tokens"
        )
    if trainer + engine > room:
        problems.append(
            f"trainer and engine together take {(trainer + engine) / gb:.1f} of {room / gb:.1f} GB "
            f"({trainer / gb:.1f} + {engine / gb:.1f})"
        )
    return problems


def phases(s: Setting, machine: Machine) -> list[Phase]:
    """A step, phase by phase. Seconds: what is overlapped counts once, so they are lower bounds under the stated rates."""
    found = [*_rollout(s, machine)]
    if s.scorings:
        found.append(_passes("log-probabilities before", s, machine, s.scorings, backward=False))
    if s.reference_scorings:
        found.append(_passes("log-probabilities of the reference", s, machine, s.reference_scorings, backward=False))
    found.append(_passes("update, forward and backward", s, machine, s.epochs, backward=True))
    owned = s.shape.parameters / s.shards
    # The norm reads the gradient and clipping rewrites it; AdamW reads four values of a parameter and writes three.
    found.append(_phase("optimizer", machine, memory_bytes=s.optimizer_steps * owned * MASTER * (1 + 2 + 4 + 3)))
    found.append(_sync(s, machine))
    return found


def _rollout(s: Setting, machine: Machine) -> list[Phase]:
    """Bytes and seconds of one engine.

    Its ranks sum what they have after each attention and each MLP, and nothing else goes on meanwhile.
    """
    b, shape, ranks = s.batch, s.shape, s.tensor_parallel
    num = sequences(s)
    groups = num / b.samples
    shared = 0 if s.block_size is None else (b.prompt - 1) // s.block_size * s.block_size
    computed = groups * (b.prompt + (b.samples - 1) * (b.prompt - shared))
    engine = replace(machine, flops=machine.engine_flops, bandwidth=machine.bandwidth * machine.bandwidth_share)
    flops = (shape.matmul_flops(computed, num) + shape.attention(groups * b.prompt * (b.prompt + 1) / 2)) / ranks
    prefill = _summed(_phase("rollout, prompts", engine, flops=flops), s, machine, computed, 1)
    together = concurrent(s, machine) or min(s.max_num_seqs, num)  # as if there was room, where there is none
    steps = math.ceil(num / together) * b.completion
    seen = b.prompt + b.completion / 2
    weights = s.engine_width * (shape.layers * shape.block_parameters + shape.head_weights) / ranks
    read = weights + together * seen * kv_token(s)
    flops = (shape.matmul_flops(together, together) + shape.attention(together * seen)) / ranks
    decode = _phase("rollout, completions", engine, flops=steps * flops, memory_bytes=steps * read)
    decode = _summed(decode, s, machine, steps * together, steps)
    return [prefill, replace(decode, seconds=decode.seconds + steps * machine.engine_step)]


def _summed(phase: Phase, s: Setting, machine: Machine, positions: float, passes: int) -> Phase:
    """The same phase with the sums over an engine's ranks."""
    sums = 2 * s.shape.layers
    size = sums * positions * s.shape.hidden * s.engine_width
    link_s = machine.exchange(size, s.tensor_parallel, passes * sums)
    link_bytes = 2 * size * (s.tensor_parallel - 1) / s.tensor_parallel
    return replace(phase, link_bytes=link_bytes, link_s=link_s, seconds=phase.seconds + link_s)


def _passes(name: str, s: Setting, machine: Machine, passes: int, backward: bool) -> Phase:
    """So many over a rollout batch."""
    b, shape, width = s.batch, s.shape, s.width
    steps = passes * s.optimizer_steps // s.epochs
    active = replace(b, groups=math.ceil(b.groups * (1 - s.idle_share))) if backward else replace(b, groups=0)
    idle = replace(b, groups=b.groups - active.groups)
    flops = (active.update(shape, s.checkpointing) + idle.forward(shape)) / s.context_parallel
    whole, blocks = width * shape.parameters, width * shape.layers * shape.block_parameters
    m, ranks = active.micro_batches, s.shards
    gathered = (m + idle.micro_batches) * whole + m * blocks
    reduced = m * MASTER * shape.parameters
    units = shape.layers + 1
    collectives = (m + idle.micro_batches) * units + m * (units + shape.layers)
    seconds = machine.gather(gathered + reduced, ranks, collectives)
    seconds += machine.sum_replicas(reduced / ranks, s.replicas, ranks, m * units)
    moved = (gathered + reduced) * (ranks - 1) / ranks + 2 * reduced / ranks * (s.replicas - 1) / s.replicas
    exchanged = exchange(s, active, 2 + s.checkpointing) + exchange(s, idle, 1)
    rate = machine.link if s.context_parallel <= machine.per_node else machine.network
    return _phase(
        name,
        machine,
        flops=steps * flops,
        link_bytes=steps * (moved + exchanged),
        link_s=steps * (seconds + exchanged / rate),
    )


def exchange(s: Setting, batch: Batch, passes: int) -> float:
    """Bytes a rank sends so that it has all positions of some heads, and back: queries, keys, values and outputs."""
    c = s.context_parallel
    entries = 2 * (s.shape.heads + s.shape.kv_heads) * s.shape.head_width * s.shape.layers
    return passes * s.width * entries * batch.positions / c * (c - 1) / c


def _sync(s: Setting, machine: Machine) -> Phase:
    """Each parameter gathered whole in float32, then written in the engine's dtype: one after the other."""
    size = MASTER * s.shape.parameters
    gathering = machine.gather(size, s.shards, s.shape.tensors)
    moved = 2 * size + s.engine_width * s.shape.parameters / s.tensor_parallel
    sync = _phase(
        "weight sync", machine, memory_bytes=moved, link_bytes=size * (s.shards - 1) / s.shards, link_s=gathering
    )
    return replace(sync, seconds=sync.memory_s + sync.link_s)


def _phase(
    name: str,
    machine: Machine,
    flops: float = 0.0,
    memory_bytes: float = 0.0,
    link_bytes: float = 0.0,
    link_s: float = 0.0,
) -> Phase:
    products_s = flops / (machine.flops * machine.products_share)
    memory_s = memory_bytes / machine.bandwidth
    return Phase(
        name,
        flops,
        memory_bytes,
        link_bytes,
        products_s,
        memory_s,
        link_s,
        seconds=max(products_s, memory_s, link_s),
    )


def rollouts_bytes(s: Setting) -> float:
    """Bytes of a step's completions as Python objects, pickled: every rank receives them to deal them out anew."""
    return PICKLED * s.groups * s.batch.samples * s.batch.completion
