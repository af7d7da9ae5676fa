"""transformers' continuous batching as a rollout engine: a cache in pages, shared prompts, and no padding.

A completion that is done makes room for the next one. For models that vLLM does not know, or where it is not installed.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from rlpost.errors import UserError
from rlpost.rollout.engine import Sampling
from rlpost.rollout.transformers import SeededDraw, TransformersEngine, warpers
from rlpost.types import Completion, Prompt


class PagedTransformersEngine(TransformersEngine):
    """A model of its own, generating for at most `max_num_seqs` prompts at a time.

    Args:
        directory: the model, in Hugging Face format.
        end_token_ids: tokens that end a completion.
        max_model_len: longest prompt plus completion, in tokens.
        dtype: the type of its weights.
        max_num_seqs: completions decoded together.
        page_size: tokens a page of the cache holds; prompts share whole pages only.
    """

    def __init__(
        self,
        directory: Path,
        end_token_ids: Sequence[int],
        max_model_len: int,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        page_size: int = 32,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(directory, end_token_ids, max_model_len, dtype, 2**31, trust_remote_code)
        self._model.set_attn_implementation("sdpa")
        self._config_of_batches = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=max_num_seqs * math.ceil(max_model_len / page_size),
            max_requests_per_batch=max_num_seqs,
            max_batch_tokens=max(max_model_len, 512),
            use_async_batching=False,  # it would draw tokens for completions that are done
            use_cuda_graph=False,
        )

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], own: Sequence[Sampling]
    ) -> Iterable[tuple[int, Completion]]:
        sampling = own[0]
        if sampling.repetition_penalty != 1 or sampling.bad_words or any(prompt.images for prompt in prompts):
            raise UserError(
                "rollout=paged knows neither repetition_penalty nor bad_words nor images; use rollout=vllm or transformers"
            )
        draws = [SeededDraw([seed], sampling.temperature) for seed in seeds]
        processors = ContinuousBatchingLogitsProcessorList(
            LogitsProcessorList([*self._restrictions(sampling), *warpers(sampling), _Draws(draws)])
        )
        processors.tensors_required = 1  # the draws' indices
        manager = self._model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=self._end_token_ids, max_new_tokens=sampling.max_tokens),
            self._config_of_batches,
        )
        manager.logit_processor = processors
        # All of them before it starts: which ones come into a batch together would depend on the time otherwise.
        for index, (prompt, settings) in enumerate(zip(prompts, own, strict=True)):
            manager.add_request(list(prompt.token_ids), str(index), settings.max_tokens, index=index)
        manager.start()
        try:
            for _ in prompts:
                result = manager.get_result()
                if result is None or result.error:
                    raise RuntimeError(f"continuous batching failed: {result and result.error}")
                index = int(result.request_id)
                logprobs = torch.cat(draws[index].logprobs).tolist()
                yield index, self._completion(result.generated_tokens, logprobs, own[index])
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()


class _Draws(ContinuousBatchingLogitsProcessor):
    """Each request's own draw, whichever requests are in a batch with it."""

    supported_kwargs: ClassVar[dict[str, type]] = {"index": int}  # pyright: ignore[reportIncompatibleVariableOverride] - they are the class's there too
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()  # pyright: ignore[reportIncompatibleVariableOverride] - they are the class's there too

    def __init__(self, draws: Sequence[SeededDraw]) -> None:
        self._draws = draws

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.fill_(-1)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        indices = [request.state.logit_processor_kwargs["index"] for request in requests_with_new_token]
        return torch.tensor(indices, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the batch calls it by index
        """Rows of -1 are of prompts that do not fit into the batch as a whole: no token of theirs is sampled yet."""
        rows = zip(tensor_arg[: len(scores)].tolist(), scores.split(1), strict=True)
        return torch.cat([row if index < 0 else self._draws[index](None, row) for index, row in rows])
