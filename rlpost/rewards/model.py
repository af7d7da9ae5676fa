"""A reward model: a sequence-classification model that scores whole conversations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlpost.errors import UserError, require


class ModelReward:
    """The model's score of prompt and completion, under its own tokenizer and chat template.

    Args:
        path: a local directory or a hub id.
        revision: a branch, a tag or a commit of the hub's repository; None: its main branch.
        label: the class whose probability is the score, by name or number; None is the only logit of a model that has one.
        batch_size: conversations a forward pass takes.
        max_tokens: longer conversations lose their beginning.
        dtype: the type of the weights.
        device: cpu, cuda, cuda:1, ...; auto spreads the layers over the GPUs there are; None is the first GPU, or the CPU.
        trust_remote_code: run Python code that comes with the model.
        threads: CPU threads; None leaves them as they are. In a scoring process there is one.

    Raises: UserError if it cannot be loaded, or the label is not one of the model's.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"accelerate": "reward-model"}

    def __init__(
        self,
        path: str,
        revision: str | None = None,
        label: str | int | None = None,
        batch_size: int = 16,
        max_tokens: int = 2048,
        dtype: str = "float32",
        device: str | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        require(self.requires_packages, f"reward: path={path}")
        if threads is not None:
            torch.set_num_threads(threads)
        directory = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        known = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, **known)
            self._model = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype=getattr(torch, dtype), device_map=place, **known
            )
        except (OSError, ValueError) as error:
            raise UserError(f"reward: path={path}: {str(error).splitlines()[0]}") from error
        self._model.eval()
        self._label = self._label_index(label)
        self._batch_size, self._max_tokens = batch_size, max_tokens

    def __call__(
        self, *, completions: list[str], messages: list[list[dict[str, Any]]], prompts: list[str], **_: Any
    ) -> list[float]:
        rows = [self._token_ids(*row) for row in zip(messages, prompts, completions, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores: dict[int, float] = {}
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            scores.update(zip(chosen, self._scores([rows[i] for i in chosen]).tolist(), strict=True))
        return [scores[i] for i in range(len(rows))]

    @torch.inference_mode()
    def _scores(self, rows: Sequence[list[int]]) -> Tensor:
        """[len(rows)] float32."""
        # The model looks for the last token that is not padding, so padding must be no row's token: often it is the end
        # token, with which a conversation ends.
        used = {token for row in rows for token in row}
        padding = next(token for token in range(len(used) + 1) if token not in used)
        self._model.config.get_text_config().pad_token_id = padding
        width = max(map(len, rows))
        input_ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self._model.device
        logits = self._model(input_ids=input_ids.to(device), attention_mask=mask.to(device)).logits.float()
        return (logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]).cpu()

    def _token_ids(self, messages: list[dict[str, Any]], prompt: str, completion: str) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is not None and messages:
            conversation = [*messages, {"role": "assistant", "content": completion}]
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(prompt + completion)
        return ids[-self._max_tokens :]

    def _label_index(self, label: str | int | None) -> int | None:
        config = self._model.config
        if label is None:
            if config.num_labels != 1:
                raise UserError(
                    f"reward: the model has {config.num_labels} labels ({', '.join(config.label2id)}); set label to one"
                )
            return None
        index = config.label2id.get(label, label) if isinstance(label, str) else label
        if not isinstance(index, int) or not 0 <= index < config.num_labels:
            raise UserError(f"reward: label={label}: the model has {', '.join(config.label2id)}")
        return index
