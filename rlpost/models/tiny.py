"""Random models, built in seconds: every part of the real thing, for tests and for a first look."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlpost.errors import require
from rlpost.models.sources import cached, save_model

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same for messages in parts, as processors take them.
CHATML_OF_PARTS = CHATML.replace(
    "{{ message['content'] }}",
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}",
)
_SPREAD = 0.1  # of weights: wide enough for distributions that are not flat


@dataclass(frozen=True)
class TinyLlama:
    """A random Llama with a byte-level tokenizer: every part of the real thing, built in a second, for tests.

    Attributes:
        seed: the seed of the weights.
        hidden_size: width of the residual stream.
        num_layers: blocks.
        num_heads, num_kv_heads: attention heads, and heads of keys and values, which divide them.
        tied: the head shares its weights with the embeddings.
        context: the longest sequence, in tokens.
    """

    seed: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    tied: bool = True
    context: int = 4096

    @property
    def trust_remote_code(self) -> bool:
        return False

    def context_length(self) -> int:
        return self.context

    def directory(self) -> Path:
        return cached(f"tiny-llama-{_key(self)}", self._build)

    def _build(self, target: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            **_for(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            initializer_range=_SPREAD,
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            save_model(LlamaForCausalLM(config), target)
        tokenizer.save_pretrained(target)


@dataclass(frozen=True)
class TinyVisionLlama:
    """A random Idefics3 (SmolVLM's architecture): a vision tower of two layers before the same Llama.

    An image is scaled to 28 x 28 pixels and becomes 4 tokens and the three around them.

    Attributes:
        seed: the seed of the weights.
        context: the longest sequence, in tokens.
    """

    seed: int = 0
    context: int = 4096

    @property
    def trust_remote_code(self) -> bool:
        return False

    requires_packages: ClassVar[Mapping[str, str]] = {"PIL": "images"}

    def context_length(self) -> int:
        return self.context

    def directory(self) -> Path:
        return cached(f"tiny-vision-llama-{_key(self)}", self._build)

    def _build(self, target: Path) -> None:
        require(self.requires_packages, "model=tiny_vision")
        import torch
        from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        tokenizer = byte_tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
        text = LlamaConfig(
            **_for(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=self.context,
            initializer_range=_SPREAD,
        )
        vision = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "initializer_range": _SPREAD,
        }
        config = Idefics3Config(
            vision_config=vision,
            text_config=text.to_dict(),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        size = {"longest_edge": 28}
        images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            save_model(Idefics3ForConditionalGeneration(config), target)
        processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=CHATML_OF_PARTS)
        processor.save_pretrained(target)


def byte_tokenizer(*more: str) -> Any:
    """A tokenizer whose tokens are the 256 bytes and special tokens, three and `more`, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
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


def _for(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _key(source: Any) -> str:
    """A digest of the settings and the template: other ones get another directory."""
    return hashlib.sha256(json.dumps([asdict(source), CHATML], sort_keys=True).encode()).hexdigest()[:12]
