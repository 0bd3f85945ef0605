"""Knows what llama, mistral, qwen2 and qwen3 look like on disk, so that most directories are judged without torch.

It only accepts. Whatever is unusual is no plain decoder here, and transformers decides on it (`whole.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spot_async.config.training import MLP
from spot_async.errors import DataError
from spot_async.models.model_size import NEEDED, ModelSize, size_of
from spot_async.models.small_files import CONFIG_FILE, DTYPE_KEYS, read_json
from spot_async.models.weight_files import FLOATING, Shapes, weight_headers

SIZES = (*NEEDED, "num_key_value_heads", "max_position_embeddings")
DTYPES = frozenset({"float32", "float16", "bfloat16"})
NUMBERS, NOTHING = (int, float), type(None)
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_mrope", "use_sliding_window")
# The keys that a plain config.json may have, and the types of their values. transformers checks types as strictly.
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*SIZES, "head_dim", "max_window_layers", "pretraining_tp"), (int,)),
    **dict.fromkeys((*DTYPE_KEYS, "model_type", "transformers_version", "_name_or_path", "hidden_act"), (str,)),
    **dict.fromkeys(SWITCHES, (bool,)),
    **dict.fromkeys(("architectures", "layer_types"), (list,)),
    **dict.fromkeys(("initializer_range", "rms_norm_eps"), (float,)),
    **dict.fromkeys(("attention_dropout", "rope_theta"), NUMBERS),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, NOTHING)),
    **dict.fromkeys(("sliding_window", "bos_token_id", "pad_token_id"), (int, NOTHING)),
    "eos_token_id": (int, list, NOTHING),
}
LLAMA3_ROPE = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def is_plainly_whole(directory: Path) -> bool:
    """Whether names, shapes and types of a directory's tensors are exactly those of a plain decoder.

    So there is no tensor that could differ from one that it is tied to.
    """
    try:
        size = plain_size(read_json(directory / CONFIG_FILE))
        headers = weight_headers(directory)
    except DataError:
        return False
    shapes = {name: each.shape for name, each in headers.items()}
    are_numbers = all(each.dtype in FLOATING for each in headers.values())
    return are_numbers and size is not None and shapes == plain_shapes(size)


def plain_size(config: dict[str, Any]) -> ModelSize | None:
    """Return a plain decoder's size by its config.json; None for another's, or with values that transformers refuses.

    Also None with biases that the kind has not by itself, of which `size_of` knows nothing.
    """
    if not all(type(value) in TYPES.get(key, ()) for key, value in config.items()):
        return None
    size = size_of(config)
    if size is None or not all(config.get(key, 0) > 0 for key in SIZES):
        return None
    kind, ends = config["model_type"], config.get("eos_token_id")
    full = ["full_attention"] * size.layers
    is_plain = (
        (kind != "qwen3" or "head_dim" in config)  # it has a width of its own, whatever the others are
        and config.get("head_dim", size.head) > 0
        and size.head % 2 == 0
        and size.hidden % config["num_attention_heads"] == 0
        and config.get("hidden_act", "silu") == "silu"
        and all(config[key] in DTYPES for key in DTYPE_KEYS if key in config)
        and not config.get("use_sliding_window", False)
        and ("layer_types" not in config or (kind in ("qwen2", "qwen3") and config["layer_types"] == full))
        and 0 <= config.get("initializer_range", 0.0) <= 1
        and 0 <= (config.get("pad_token_id") or 0) < size.vocabulary
        and all(type(each) is int for each in (ends if isinstance(ends, list) else ()))
        and all(type(each) is str for each in config.get("architectures", ()))
        and all(_is_known_rope(config.get(key) or {}) for key in ("rope_scaling", "rope_parameters"))
    )
    return size if is_plain else None


def _is_known_rope(rope: dict[str, Any]) -> bool:
    numbers = {key: value for key, value in rope.items() if key != "rope_type"}
    needed = {"default": set[str](), "llama3": LLAMA3_ROPE}.get(str(rope.get("rope_type", "default")))
    return (
        needed is not None
        and needed <= numbers.keys() <= needed | {"rope_theta"}
        and all(type(value) in NUMBERS and value > 0 for value in numbers.values())
    )


def plain_shapes(size: ModelSize) -> Shapes:
    """Return the shapes of a plain decoder's tensors by name; of tied ones, only the embedding's."""
    layer: Shapes = {f"{name}.weight": (size.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    layer |= {f"{'mlp' if name in MLP else 'self_attn'}.{name}.weight": shape for name, shape in size.matrices.items()}
    if size.has_query_norm:
        layer |= {f"self_attn.{name}.weight": (size.head,) for name in ("q_norm", "k_norm")}
    if size.has_query_bias:
        layer |= {f"self_attn.{name}.bias": size.matrices[name][:1] for name in ("q_proj", "k_proj", "v_proj")}
    outer = ("model.embed_tokens.weight", "lm_head.weight")[: 1 if size.tied else 2]
    return {
        "model.norm.weight": (size.hidden,),
        **dict.fromkeys(outer, (size.vocabulary, size.hidden)),
        **{f"model.layers.{at}.{name}": shape for at in range(size.layers) for name, shape in layer.items()},
    }
