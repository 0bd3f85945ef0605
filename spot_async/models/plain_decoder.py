"""Knows what llama, mistral, qwen2 and qwen3 look like on disk, so that most directories are judged without torch.

It only accepts. Whatever is unusual is no plain decoder here, and transformers decides on it (`whole.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spot_async.errors import DataError
from spot_async.models.small_files import CONFIG_FILE, DTYPE_KEYS, read_json
from spot_async.models.weight_files import FLOATING, Shapes, weight_headers

PLAIN_KINDS = ("llama", "mistral", "qwen2", "qwen3")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "max_position_embeddings")  # fmt: skip
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
        config = read_json(directory / CONFIG_FILE)
        headers = weight_headers(directory)
    except DataError:
        return False
    shapes = {name: each.shape for name, each in headers.items()}
    are_numbers = all(each.dtype in FLOATING for each in headers.values())
    return are_numbers and is_plain(config) and shapes == plain_shapes(config)


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of a plain decoder, with values that transformers takes."""
    if not all(type(value) in TYPES.get(key, ()) for key, value in config.items()):
        return False
    kind, ends = config.get("model_type"), config.get("eos_token_id")
    if kind not in PLAIN_KINDS or not all(config.get(key, 0) > 0 for key in SIZES):
        return False
    width = _head_width(config)
    full = ["full_attention"] * config["num_hidden_layers"]
    return (
        width > 0
        and width % 2 == 0
        and config["hidden_size"] % config["num_attention_heads"] == 0
        and config.get("hidden_act", "silu") == "silu"
        and all(config[key] in DTYPES for key in DTYPE_KEYS if key in config)
        and not config.get("use_sliding_window", False)
        and ("layer_types" not in config or (kind in ("qwen2", "qwen3") and config["layer_types"] == full))
        and 0 <= config.get("initializer_range", 0.0) <= 1
        and 0 <= (config.get("pad_token_id") or 0) < config["vocab_size"]
        and all(type(each) is int for each in (ends if isinstance(ends, list) else ()))
        and all(type(each) is str for each in config.get("architectures", ()))
        and all(_is_known_rope(config.get(key) or {}) for key in ("rope_scaling", "rope_parameters"))
    )


def _head_width(config: dict[str, Any]) -> int:
    """Return the width of an attention head, 0 where config.json must say it and does not."""
    otherwise = 0 if config["model_type"] == "qwen3" else config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim", otherwise))


def _is_known_rope(rope: dict[str, Any]) -> bool:
    numbers = {key: value for key, value in rope.items() if key != "rope_type"}
    needed = {"default": set[str](), "llama3": LLAMA3_ROPE}.get(str(rope.get("rope_type", "default")))
    return (
        needed is not None
        and needed <= numbers.keys() <= needed | {"rope_theta"}
        and all(type(value) in NUMBERS and value > 0 for value in numbers.values())
    )


def plain_shapes(config: dict[str, Any]) -> Shapes:
    """Return the shapes of a plain decoder's tensors by name; of tied ones, only the embedding's."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    width = _head_width(config)
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
                 "o_proj": (hidden, queries)}  # fmt: skip
    feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    layer: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    layer |= {f"mlp.{name}.weight": shape for name, shape in feed_forward.items()}
    if kind == "qwen3":
        layer |= {f"self_attn.{name}.weight": (width,) for name in ("q_norm", "k_norm")}
    if kind == "qwen2":
        layer |= {f"self_attn.{name}.bias": attention[name][:1] for name in ("q_proj", "k_proj", "v_proj")}
    elif kind in ("llama", "qwen3") and config.get("attention_bias", False):
        layer |= {f"self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
    if kind == "llama" and config.get("mlp_bias", False):
        layer |= {f"mlp.{name}.bias": shape[:1] for name, shape in feed_forward.items()}
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    numbers = range(config["num_hidden_layers"])
    return shapes | {f"model.layers.{at}.{name}": shape for at in numbers for name, shape in layer.items()}
