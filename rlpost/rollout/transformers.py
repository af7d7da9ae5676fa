"""transformers' generate as a rollout engine: slower, and with no build of vLLM to match."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from rlpost.data.vision import Vision
from rlpost.errors import UserError
from rlpost.models.sources import load_model, load_processor, load_tokenizer, takes_images
from rlpost.rollout.engine import Sampling, check_fits
from rlpost.types import Completion, Prompt


class TransformersEngine:
    """A model of its own, generating in batches of `batch_size` prompts of similar length.

    Args:
        directory: the model, in Hugging Face format.
        end_token_ids: tokens that end a completion.
        max_model_len: longest prompt plus completion, in tokens.
        dtype: the type of its weights.
        batch_size: prompts that are continued together.
    """

    def __init__(
        self,
        directory: Path,
        end_token_ids: Sequence[int],
        max_model_len: int,
        dtype: str = "float32",
        batch_size: int = 64,
        trust_remote_code: bool = False,
    ) -> None:
        self._device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._model = load_model(directory, getattr(torch, dtype), trust_remote_code).to(self._device)
        self._model.eval()
        # generate() fills what a call leaves open from here; end tokens are given explicitly.
        self._model.generation_config = GenerationConfig()
        self._tokenizer = load_tokenizer(directory, trust_remote_code)
        self._vision = Vision(load_processor(directory, trust_remote_code)) if takes_images(directory) else None
        self._end_token_ids = list(end_token_ids)
        self._max_model_len = max_model_len
        self._batch_size = batch_size
        self._version = 0

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        check_fits(prompts, sampling, self._max_model_len)
        own = [sampling.of(prompt) for prompt in prompts]
        if any(settings.is_guided for settings in own):
            raise UserError("transformers does not guide completions (regex, json_schema, choice); use rollout=vllm")
        # What a batch must have in common: all but the limits, which cut afterwards.
        kinds: dict[str, list[int]] = {}
        for i, settings in enumerate(own):
            kinds.setdefault(repr(replace(settings, max_tokens=0)), []).append(i)
        for kind in kinds.values():
            # Sorted so that a batch pads little; a stable order, so that a run repeats.
            order = sorted(kind, key=lambda i: len(prompts[i].token_ids))
            for start in range(0, len(order), self._batch_size):
                chosen = order[start : start + self._batch_size]
                batch = [prompts[i] for i in chosen], [seeds[i] for i in chosen], [own[i] for i in chosen]
                version = self._version
                for number, completion in self._generate(*batch):
                    yield chosen[number], replace(completion, policy_version=version)

    @torch.no_grad()
    def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        parameters = dict(self._model.named_parameters())
        for name, weight in named_weights:
            parameters.pop(name).copy_(weight)
        if parameters:
            raise RuntimeError(f"the trainer sent no weights for {sorted(parameters)[:3]}")
        self._version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._model

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], own: Sequence[Sampling]
    ) -> Iterable[tuple[int, Completion]]:
        """Args: own: each prompt's sampling, alike but for max_tokens."""
        sampling = replace(own[0], max_tokens=max(settings.max_tokens for settings in own))
        width = max(len(prompt.token_ids) for prompt in prompts)
        input_ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(input_ids)  # from lengths: the padding id means nothing
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        starts = [width - len(prompt.token_ids) for prompt in prompts]
        images = self._vision.model_inputs(prompts, starts, width) if self._vision else {}
        sampler = SeededDraw(seeds, sampling.temperature)
        output = self._model.generate(
            input_ids.to(self._device),
            attention_mask=mask.to(self._device),
            **{name: values.to(self._device) for name, values in images.items()},
            generation_config=self._config(sampling),
            logits_processor=LogitsProcessorList([*self._restrictions(sampling), *warpers(sampling), sampler]),
            tokenizer=self._tokenizer if sampling.stop else None,
        )
        logprobs = torch.stack(sampler.logprobs, dim=1).cpu()
        rows = zip(output[:, width:].tolist(), logprobs.tolist(), own, strict=True)
        return enumerate(
            self._completion(ids[: settings.max_tokens], values, settings) for ids, values, settings in rows
        )

    def _restrictions(self, sampling: Sampling) -> list[LogitsProcessor]:
        """Restrictions on the logits themselves, before the temperature, as vLLM orders them."""
        restrictions: list[LogitsProcessor] = []
        if sampling.biases:
            biases = {(token,): bias for token, bias in sampling.biases.items()}
            biased: Any = biases  # its annotation has lists, its code takes this
            restrictions.append(SequenceBiasLogitsProcessor(biased))
        if sampling.bad_words:
            # Within a text a word is written with a blank before it, at its beginning without.
            words = {prefix + word for word in sampling.bad_words for prefix in ("", " ")}
            ids = [self._tokenizer.encode(word, add_special_tokens=False) for word in sorted(words)]
            restrictions.append(NoBadWordsLogitsProcessor(ids))
        return restrictions

    def _config(self, sampling: Sampling) -> GenerationConfig:
        return GenerationConfig(
            do_sample=False,  # the seeded sampler makes the argmax a draw
            max_new_tokens=sampling.max_tokens,
            repetition_penalty=sampling.repetition_penalty,
            stop_strings=list(sampling.stop) or None,
            eos_token_id=self._end_token_ids,
            pad_token_id=self._end_token_ids[0],
        )

    def _completion(self, ids: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        """Cut what generate() padded after the row was done: at its first end token, or where a stop string came."""
        length = next((i + 1 for i, token in enumerate(ids) if token in self._end_token_ids), len(ids))
        stopped = length < len(ids) or ids[length - 1] in self._end_token_ids
        if sampling.stop:
            for end in range(1, length + 1):
                if any(s in self._tokenizer.decode(ids[:end]) for s in sampling.stop):
                    length, stopped = end, True
                    break
        ids = ids[:length]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(tuple(ids), tuple(logprobs[:length]), text, "stop" if stopped else "length")


def warpers(sampling: Sampling) -> list[LogitsProcessor]:
    """Temperature first, then the cuts, as vLLM orders them."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    if sampling.temperature == 0:
        return []
    warpers: list[LogitsProcessor] = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


class SeededDraw(LogitsProcessor):
    """Turns generate()'s argmax into a draw under each row's own seed (Gumbel-max), and keeps its logprob."""

    def __init__(self, seeds: Sequence[int], temperature: float) -> None:
        self.logprobs: list[Tensor] = []
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._greedy = temperature == 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - its base takes subclasses of Tensor
        logprobs = scores.float().log_softmax(-1)
        if self._greedy:
            noisy = logprobs
        else:
            exponential = torch.stack(
                [torch.empty(scores.shape[-1]).exponential_(generator=g) for g in self._generators]
            )
            noisy = logprobs - exponential.log().to(scores.device)
        chosen = noisy.argmax(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, chosen).squeeze(-1))
        return noisy
