"""Computes a model's size from its config.json: parameters, cache, what training keeps, and the arithmetic of a pass.

It is exact for decoders like Qwen2, Qwen3, Llama and Mistral, and refuses others. It knows no devices and no runs.

The arithmetic is that of model FLOPs utilisation (MFU), as in PaLM (Chowdhery et al. 2022, appendix B), nanochat and
torchtitan: what the step needs, whoever computes it and however. A multiplication and its addition are 2 operations.
Not counted are embedding look-ups, norms, activation functions, padding, and what is computed a second time only to
save memory (layers and blocks of logits in the backward pass).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spot_async.config.training import TARGETS, LoraConfig
from spot_async.models.small_files import CONFIG_FILE, read_json

NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL = ("head_dim", "num_key_value_heads", "sliding_window", "max_window_layers")
SIZED = ("qwen2", "qwen3", "llama", "mistral")
Precision = Literal["float32", "autocast", "bfloat16"]  # autocast: only matrix products are in bfloat16


class KeptBytes(NamedTuple):
    """The bytes that a layer keeps of a token for the backward pass, per unit of each width."""

    hidden: int  # residuals and norms
    feed_forward: int  # gate, up and their product
    head: int  # of queries and keys
    head_norm: int  # of queries and keys, in addition if they have a norm
    joined: int  # of queries, in addition if trajectories are packed: the attention to each, joined to a row
    residual: int  # of the layer's input; counted in `hidden` already


KEPT_BYTES: dict[Precision, KeptBytes] = {
    "float32": KeptBytes(hidden=24, feed_forward=16, head=8, head_norm=8, joined=4, residual=4),
    "autocast": KeptBytes(hidden=26, feed_forward=8, head=4, head_norm=6, joined=2, residual=4),
    "bfloat16": KeptBytes(hidden=16, feed_forward=8, head=4, head_norm=6, joined=2, residual=2),
}


@dataclass(frozen=True)
class ModelSize:
    """The shape of a model. Widths are numbers of activations of a token."""

    layers: int
    hidden: int
    feed_forward: int
    queries: int  # heads x head_dim
    keys: int  # key-value heads x head_dim
    head: int
    vocabulary: int
    tied: bool  # whether embedding and output layer share their weights
    has_query_bias: bool
    has_query_norm: bool
    window: int = 0  # tokens that a token attends to in the layers that limit it
    windowed_layers: int = 0

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The shapes of a layer's matrices, to what and from what width, by the names of `config.training.TARGETS`."""
        return {
            "q_proj": (self.queries, self.hidden),
            **dict.fromkeys(("k_proj", "v_proj"), (self.keys, self.hidden)),
            "o_proj": (self.hidden, self.queries),
            **dict.fromkeys(("gate_proj", "up_proj"), (self.feed_forward, self.hidden)),
            "down_proj": (self.hidden, self.feed_forward),
        }

    @property
    def layer_matrices(self) -> int:
        """The parameters of a layer that a token is multiplied with."""
        return sum(map(math.prod, self.matrices.values()))

    @property
    def layer_parameters(self) -> int:
        vectors = (self.queries + 2 * self.keys) * self.has_query_bias + 2 * self.head * self.has_query_norm
        return self.layer_matrices + vectors + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """The parameters of the embedding, the output layer and the last norm."""
        return self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def adapter_parameters(self, lora: LoraConfig | None) -> int:
        """Return the parameters of a layer's adapters."""
        return 0 if lora is None else lora.rank * sum(sum(self.matrices[each]) for each in TARGETS[lora.targets])

    @property
    def cache_bytes_per_token(self) -> int:
        """The bytes of a token's keys and values, in 16 bits."""
        return self.layers * 2 * self.keys * 2

    def cache_bytes_on(self, devices: int) -> float:
        """Return the bytes of a token's keys and values on each of several devices. A head is not divided."""
        return self.cache_bytes_per_token / min(devices, self.keys // self.head)

    def activation_bytes_per_token(
        self, precision: Precision, *, recomputed_layers: int = 0, is_packed: bool = False
    ) -> int:
        """Return the bytes per token that the trainer's forward pass keeps for the backward pass.

        Those are the activations of all layers or, of layers that are recomputed, the inputs and one layer's
        activations. The coefficients were measured from the tensors that autograd saved (transformers 5, torch 2.13,
        257 tokens; one width was varied at a time).
        """
        kept = KEPT_BYTES[precision]
        heads = (kept.head + kept.head_norm * self.has_query_norm) * (self.queries + self.keys)
        heads += kept.joined * self.queries * is_packed
        layer = kept.hidden * self.hidden + kept.feed_forward * self.feed_forward + heads
        whole_layers = self.layers - recomputed_layers + (recomputed_layers > 0)
        return recomputed_layers * kept.residual * self.hidden + whole_layers * layer


def read_size(directory: Path) -> ModelSize | None:
    """Return the size of a directory's model; None for unknown architectures. The directory must have a config.json."""
    return size_of(read_json(directory / CONFIG_FILE))


def size_of(config: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of a model by the values of its config.json; None for unknown architectures.

    Also None where a value is left out, because it is the architecture's default.
    """
    kind = config.get("model_type")
    if kind not in SIZED or config.get("mlp_bias") or (kind != "qwen2" and config.get("attention_bias")):
        return None
    if any(type(config.get(key)) is not int or config[key] < 1 for key in NEEDED):
        return None
    if any(type(config.get(key)) not in (int, type(None)) for key in OPTIONAL):
        return None
    heads = config["num_attention_heads"]
    window, windowed_layers = _window(kind, config)
    head = config.get("head_dim") or config["hidden_size"] // heads
    return ModelSize(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        feed_forward=config["intermediate_size"],
        queries=heads * head,
        keys=(config.get("num_key_value_heads") or heads) * head,
        head=head,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        has_query_bias=kind == "qwen2",
        has_query_norm=kind == "qwen3",
        window=window,
        windowed_layers=windowed_layers,
    )


def _window(kind: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many tokens a token attends to at most, and in how many layers; (0, 0) without such a limit."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window", 4096)
    if not window or kind == "llama" or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return 0, 0
    if kind == "mistral":
        return window, layers
    types, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(types, list):
        return window, types.count("sliding_attention")
    return window, max(0, layers - (28 if first is None else first))


def forward_operations(size: ModelSize, lengths: Collection[int], rows: int, lora: LoraConfig | None = None) -> int:
    """Return the operations of one forward pass over sequences of these numbers of input tokens.

    A token takes 2 for each parameter of the layers' matrices. The output layer counts for `rows` only, those whose
    logits are computed. Attention to a token takes 4 for each layer and query width. A token attends to itself and to
    those before it, which is half of what PaLM counts.
    """
    whole_layers = size.layers - size.windowed_layers
    attended = whole_layers * _attended(lengths) + size.windowed_layers * _attended(lengths, size.window)
    adapters = 2 * size.layers * size.adapter_parameters(lora) * sum(lengths)
    return _matrices(size, lengths, rows) + 4 * size.queries * attended + adapters


def training_operations(
    size: ModelSize,
    lengths: Collection[int],
    rows: int,
    *,
    lora: LoraConfig | None = None,
    recomputes_behavior: bool = False,
) -> int:
    """Return the operations to train once on such sequences: three times those of the forward pass.

    So a token takes 6 for each parameter of a matrix: 2 forward, 2 for the gradient of its input, 2 for that of the
    matrix. Frozen matrices of a student with adapters take 4. With `recomputes_behavior` there is one more forward
    pass, which is part of the method.
    """
    frozen = _matrices(size, lengths, rows) if lora is not None else 0
    return (3 + recomputes_behavior) * forward_operations(size, lengths, rows, lora) - frozen


def _matrices(size: ModelSize, lengths: Collection[int], rows: int) -> int:
    return 2 * (size.layers * size.layer_matrices * sum(lengths) + size.hidden * size.vocabulary * rows)


def _attended(lengths: Collection[int], window: int | None = None) -> int:
    """Return how many pairs there are of a token and one that it attends to, in one layer."""
    found = 0
    for length in lengths:
        whole = length if window is None else min(length, window)
        found += whole * (whole + 1) // 2 + (length - whole) * whole
    return found
