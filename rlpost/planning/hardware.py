"""GPUs: the figures of data sheets, options that replace them, and the time a collective takes. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rlpost.errors import UserError

# An option of the machine: its unit, and what it says.
OPTIONS = {
    "memory-gb": (1e9, "memory"),
    "peak-tflops": (1e12, "dense matrix products at their peak, in the precision of trainer and engine"),
    "bandwidth-gb-s": (1e9, "of the memory"),
    "link-gb-s": (1e9, "to the GPUs of the same node, one direction"),
    "network-gb-s": (1e9, "of each GPU to other nodes, one direction"),
    "mfu": (1.0, "share of the peak that large products reach"),
    "mbu": (1.0, "share of the bandwidth that decoding reaches"),
    "hop-us": (1e-6, "a collective's latency for each rank in it"),
    "engine-step-ms": (1e-3, "an engine step's own time beside its kernels"),
    "reserve-gb": (1e9, "memory of driver, communicators and fragmentation"),
}
MAY_BE_ZERO = ("hop-us", "engine-step-ms", "reserve-gb")
# What no data sheet says: assumptions.
ASSUMED = {"mfu": 0.4, "mbu": 0.6, "hop-us": 3.0, "engine-step-ms": 5.0, "reserve-gb": 3.0}
# NVIDIA's data sheets of the SXM boards (peaks without sparsity), and a network card of 400 (A100: 200) Gb/s for each GPU.
# A CPU's rates are measured ones: `make bench ARGS="--only floor"` gives them.
GPUS: dict[str, dict[str, Any]] = {
    "a100-80gb": {
        "memory-gb": 80,
        "peak-tflops": {"float32": 19.5, "bfloat16": 312},
        "bandwidth-gb-s": 2039,
        "link-gb-s": 300,
        "network-gb-s": 25,
        **ASSUMED,
    },
    "h100-80gb": {
        "memory-gb": 80,
        "peak-tflops": {"float32": 67, "bfloat16": 989},
        "bandwidth-gb-s": 3350,
        "link-gb-s": 450,
        "network-gb-s": 50,
        **ASSUMED,
    },
    "h200-141gb": {
        "memory-gb": 141,
        "peak-tflops": {"float32": 67, "bfloat16": 989},
        "bandwidth-gb-s": 4800,
        "link-gb-s": 450,
        "network-gb-s": 50,
        **ASSUMED,
    },
    "cpu": {"mfu": 1.0, "mbu": 1.0, "hop-us": 100.0, "engine-step-ms": 20.0, "reserve-gb": 0.0},
}


@dataclass(frozen=True)
class Machine:
    """A GPU (or a CPU process) and what joins it to others. Bytes, FLOPs and seconds; links count one direction."""

    memory: float
    flops: float  # dense matrix products in the trainer's precision, at their peak
    engine_flops: float  # the same in the engine's
    bandwidth: float  # of its memory
    link: float  # to the others of its node
    network: float  # of each GPU, to other nodes
    products_share: float  # of `flops`, that large products reach (MFU)
    bandwidth_share: float  # of `bandwidth`, that decoding reaches
    hop: float  # a collective's latency for each rank in it
    engine_step: float  # an engine step's own time beside its kernels
    reserve: float  # memory of the driver, communicators and fragmentation
    per_node: int = 8

    def gather(self, size: float, ranks: int, collectives: int = 1) -> float:
        """Seconds of ring all-gathers, or reduce-scatters, of `size` bytes in all over consecutive ranks."""
        if ranks == 1:
            return 0.0
        inside = size * (ranks - 1) / ranks / self.link
        across = size * max(0.0, 1 - self.per_node / ranks) / (self.per_node * self.network)
        return max(inside, across) + collectives * (ranks - 1) * self.hop

    def sum_replicas(self, size: float, replicas: int, ranks: int, collectives: int = 1) -> float:
        """Seconds of ring all-reduces of `size` bytes over `replicas` ranks that are `ranks` apart."""
        if replicas == 1:
            return 0.0
        rate = self.link if replicas * ranks <= self.per_node else self.network
        return 2 * size * (replicas - 1) / replicas / rate + 2 * collectives * (replicas - 1) * self.hop

    def exchange(self, size: float, ranks: int, collectives: int) -> float:
        """Seconds in which consecutive ranks sum `size` bytes in all, in two hops each time: all to all, and back."""
        if ranks == 1:
            return 0.0
        rate = self.link if ranks <= self.per_node else self.network
        return 2 * size * (ranks - 1) / ranks / rate + 2 * collectives * self.hop


def machine_of(
    gpu: str, given: Mapping[str, float | None], precision: str, engine: str, gpus: int, per_node: int
) -> Machine:
    """The named GPU's figures, and what is given in their place.

    Args:
        given: by OPTIONS' names; None leaves the named GPU's.
        precision, engine: the dtypes of the trainer and of the engine.

    Raises: UserError for a figure that is missing or not over 0.
    """
    figures: dict[str, Any] = {**GPUS[gpu], **{name: value for name, value in given.items() if value is not None}}
    if gpus == 1:
        figures |= {"link-gb-s": 1.0, "network-gb-s": 1.0}  # nobody to talk to
    for name, (_, words) in OPTIONS.items():
        if name not in figures:
            raise UserError(f"--gpu {gpu}: --{name} is missing ({words}): give a measured one")
        values = figures[name].values() if isinstance(figures[name], Mapping) else [figures[name]]
        if min(values) < 0 or (min(values) == 0 and name not in MAY_BE_ZERO):
            raise UserError(f"--{name} {figures[name]}: expected a number over 0")
    peak: Any = figures.pop("peak-tflops")
    peaks = cast(Mapping[str, float], peak if isinstance(peak, Mapping) else dict.fromkeys((precision, engine), peak))
    value = {name: OPTIONS[name][0] * figure for name, figure in figures.items()}
    unit = OPTIONS["peak-tflops"][0]
    return Machine(
        memory=value["memory-gb"],
        flops=unit * peaks[precision],
        engine_flops=unit * peaks[engine],
        bandwidth=value["bandwidth-gb-s"],
        link=value["link-gb-s"],
        network=value["network-gb-s"],
        products_share=value["mfu"],
        bandwidth_share=value["mbu"],
        hop=value["hop-us"],
        engine_step=value["engine-step-ms"],
        reserve=value["reserve-gb"],
        per_node=per_node,
    )
