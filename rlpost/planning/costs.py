"""The costs of a model and of a step of it, counted: parameters, FLOPs and bytes. docs/scaling.md has the formulas.

Plain arithmetic, which `rlpost-plan` and the benchmarks share. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlpost.errors import UserError, nearest

# Entries of the head's blocks, as objective/logprobs.py has them; a test holds the two against each other.
CHUNK_ENTRIES = 2**24
KEPT_ENTRIES = 2**26

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def _config(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, context: int
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }


# The config.json of meta-llama/Llama-3.1-8B and -70B, and of Qwen/Qwen2.5-7B and -72B, as published.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _config("llama", 4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _config("llama", 8192, 80, 64, 8, 28672, 128256, 131072),
    "qwen2.5-7b": _config("qwen2", 3584, 28, 28, 4, 18944, 152064, 131072),
    "qwen2.5-72b": _config("qwen2", 8192, 80, 64, 8, 29568, 152064, 131072),
}


@dataclass(frozen=True)
class Shape:
    """A decoder of grouped-query attention and gated layers. FLOPs are a forward pass's, a multiplication and an addition each.

    Attributes:
        block_extra: parameters of a block outside its seven matrices: norms and biases.
        block_tensors: parameters of a block, counted as tensors.
        context: the longest sequence; None: not said.
    """

    hidden: int  # h
    layers: int  # L
    heads: int  # a
    kv_heads: int  # k
    head_width: int  # d
    inner: int  # f
    vocabulary: int  # V
    tied: bool
    block_extra: int
    block_tensors: int
    context: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> "Shape":
        """The shape that a config.json states.

        Raises: UserError for another architecture than ARCHITECTURES, or a missing key.
        """
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise UserError(f"{where}: model_type={kind} is not modelled{nearest(str(kind), ARCHITECTURES)}")
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            kv_heads = config.get("num_key_value_heads") or heads
            width = config.get("head_dim") or hidden // heads
            inner, layers, vocabulary = (
                config[key] for key in ("intermediate_size", "num_hidden_layers", "vocab_size")
            )
        except KeyError as missing:
            raise UserError(f"{where}: {missing} is missing; expected a model's config.json") from None
        biases = []
        if kind == "qwen2" or config.get("attention_bias"):
            biases += [heads * width, kv_heads * width, kv_heads * width]
        if kind != "qwen2" and config.get("attention_bias"):
            biases.append(hidden)
        if config.get("mlp_bias"):
            biases += [inner, inner, hidden]
        norms = [hidden, hidden] + ([width, width] if kind == "qwen3" else [])
        return cls(
            hidden,
            layers,
            heads,
            kv_heads,
            width,
            inner,
            vocabulary,
            tied=bool(config.get("tie_word_embeddings", False)),
            block_extra=sum(norms) + sum(biases),
            block_tensors=7 + len(norms) + len(biases),
            context=config.get("max_position_embeddings"),
        )

    @property
    def block_weights(self) -> int:
        """B: entries of a block's seven matrices."""
        return 2 * self.hidden * self.head_width * (self.heads + self.kv_heads) + 3 * self.hidden * self.inner

    @property
    def block_parameters(self) -> int:
        return self.block_weights + self.block_extra

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embeddings, the head where it is not tied, and the last norm."""
        return self.head_weights * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """P."""
        return self.layers * self.block_parameters + self.root_parameters

    @property
    def tensors(self) -> int:
        return self.layers * self.block_tensors + (2 if self.tied else 3)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and two moments in float32; a tied head is written beside the embeddings it is."""
        return 12 * self.parameters + (4 * self.head_weights if self.tied else 0)

    def matmul_flops(self, positions: float, tokens: float) -> float:
        """FLOPs of the blocks' matrix products at `positions`, and of the head's at `tokens` of them."""
        return 2 * (self.layers * self.block_weights * positions + self.head_weights * tokens)

    def attention(self, pairs: float) -> float:
        """FLOPs of all layers' attention over so many pairs of a position and one it sees."""
        return 4 * self.layers * self.heads * self.head_width * pairs

    def kv_bytes(self, width: int) -> int:
        """Bytes of a token's keys and values in all layers, `width` an entry."""
        return 2 * self.layers * self.kv_heads * self.head_width * width

    def saved_bytes(self, width: int) -> int:
        """Bytes that autograd keeps of a block for one position, `width` an entry of the compute dtype.

        Two norms; queries, keys, values, attention's output, and a float32 for each head; the gated layer's gate, its
        activation, up, and their product.
        """
        attention = width * (2 * self.heads + 2 * self.kv_heads) * self.head_width + 4 * self.heads
        return 2 * self.norm_bytes(width) + attention + 4 * width * self.inner

    def norm_bytes(self, width: int) -> int:
        """Bytes that autograd keeps of a norm: its input in float32, the input normalised, and its output."""
        return (4 + 2 * width) * self.hidden


@dataclass(frozen=True)
class Batch:
    """Groups as the trainer packs them: `samples` completions behind each prompt, at most `budget` positions a micro-batch.

    Attributes: apart: each completion has a row with a prompt of its own (the padded layout).
    """

    groups: int
    samples: int
    prompt: int  # tokens
    completion: int  # tokens
    budget: int
    apart: bool = False

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return self.groups * self.samples * self.completion

    @property
    def _a_piece(self) -> int:
        """Completions that share a prompt's positions."""
        return 1 if self.apart else min(self.samples, max(1, (self.budget - self.prompt) // self.completion))

    @property
    def _pieces(self) -> int:
        return self.groups * math.ceil(self.samples / self._a_piece)

    @property
    def positions(self) -> int:
        return self._pieces * self.prompt + self.tokens

    @property
    def micro_batches(self) -> int:
        piece = self.prompt + self._a_piece * self.completion
        return math.ceil(self._pieces / max(1, self.budget // piece))

    @property
    def pairs(self) -> int:
        """Pairs of a position and one it attends to, itself included."""
        prompt, completion = (n * (n + 1) // 2 for n in (self.prompt, self.completion))
        return self._pieces * prompt + self.groups * self.samples * (self.prompt * self.completion + completion)

    def forward(self, shape: Shape) -> float:
        """FLOPs of a forward pass over all of it."""
        return shape.matmul_flops(self.positions, self.tokens) + shape.attention(self.pairs)

    def update(self, shape: Shape, checkpointing: bool) -> float:
        """FLOPs of forward and backward passes.

        With activation checkpointing the blocks' forward pass is made twice, but for the last product of each, whose output
        nothing keeps; the head's is for tokens beyond those whose probabilities are kept.
        """
        last = 2 * shape.layers * shape.inner * shape.hidden * self.positions
        again = shape.matmul_flops(self.positions, 0) - last + shape.attention(self.pairs) if checkpointing else 0.0
        kept = min(self.tokens, self.micro_batches * (KEPT_ENTRIES // shape.vocabulary))
        return 3 * self.forward(shape) + again + shape.matmul_flops(0, self.tokens - kept)
