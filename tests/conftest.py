"""Shared by all tests: no hub, few threads, small rollouts built by hand."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Engines run inside the test's process, as they do in a run.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from rlpost.cluster.node import CORES, available_cores
from rlpost.cluster.process import family
from rlpost.data.vision import Vision
from rlpost.models.sources import end_token_ids, load_processor, load_tokenizer
from rlpost.models.tiny import TinyLlama, TinyVisionLlama
from rlpost.types import Completion, Example, Prompt, Rollout

# A busy machine is no failure, and the same commit gives the same examples everywhere.
hypothesis.settings.register_profile("rlpost", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rlpost")


def pytest_configure() -> None:
    """Give a parallel worker (make test) its share of the cores, in threads: those of its processes are as many.

    Where threads of two tests share cores they wait for each other in spin loops, which takes ten times as long. The cores
    themselves are not divided: on a machine that does other work too, one of them may have no time to spare.
    """
    if (count := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is None:
        return
    cores = max(1, available_cores() // int(count))
    os.environ |= {CORES: str(cores), "OMP_NUM_THREADS": str(min(2, cores))}
    torch.set_num_threads(min(2, cores))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton reports what it finds frozen at the end as leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "slow" not in item.keywords)  # the long files first, so that no worker waits at the end
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _forkservers() -> Iterator[None]:
    """Processes that these tests start are forks of one that has the imports."""
    with family():
        yield


@pytest.fixture(scope="module", autouse=True)
def _own_environment() -> Iterator[None]:
    """Engines and Ray set variables as they start. Processes of later tests shall not have them, nor a server of their own."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Engines and statistics collect garbage as they go, half a second each time over all that is loaded."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    return TinyLlama().directory()


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(tiny_dir)


@pytest.fixture(scope="session")
def tiny_end_tokens(tiny_dir: Path, tiny_tokenizer: Any) -> tuple[int, ...]:
    return end_token_ids(tiny_dir, tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_vision_dir() -> Path:
    return TinyVisionLlama().directory()


@pytest.fixture(scope="session")
def vision(tiny_vision_dir: Path) -> Vision:
    return Vision(load_processor(tiny_vision_dir))


@pytest.fixture
def process_group() -> Iterator[None]:
    from rlpost import distributed

    if not torch.distributed.is_initialized():
        distributed.init()
    yield
    distributed.shutdown()


def make_rollout(
    group_id: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    completion: Sequence[int] = (8, 9),
    *,
    sample_index: int = 0,
    reward: float = 0.0,
    advantage: float = 0.0,
    finish_reason: str = "stop",
    logprobs: Sequence[float] | None = None,
    answer: str | None = None,
    text: str = "",
    columns: dict[str, Any] | None = None,
    sampled_mask: Sequence[bool] | None = None,
) -> Rollout:
    example = Example(({"role": "user", "content": "?"},), answer, columns or {})
    rollout = Rollout(
        Prompt(example, tuple(prompt), "?", group_id=group_id),
        Completion(
            tuple(completion),
            tuple(logprobs or [-1.0] * len(completion)),
            text,
            finish_reason,
            None if sampled_mask is None else tuple(sampled_mask),
        ),
        sample_index,
    )
    rollout.reward, rollout.advantage = reward, advantage
    return rollout
