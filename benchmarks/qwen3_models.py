"""Makes random models with the shapes of the Qwen3 family, for benchmarks where only sizes count.

The shapes are those of the published config.json files. Weights are drawn, so nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = 151_936

# hidden, feed-forward, layers, query heads, key-value heads, tied output layer
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, False),  # to try a benchmark itself, on any machine
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
}


def vocabulary_of(size: str) -> int:
    return 512 if size == "tiny" else VOCABULARY


def qwen3_config(size: str, **changed: object) -> Qwen3Config:
    hidden, feed_forward, layers, heads, kv_heads, tied = SHAPES[size]
    shape = {
        "vocab_size": vocabulary_of(size),
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if size != "tiny" else 32,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "use_cache": True,
    }
    return Qwen3Config(**{**shape, **changed})


def save_qwen3(size: str, directory: Path, device: str, seed: int = 0, spread: float | None = None) -> Path:
    """Write a model directory (config and bfloat16 weights) unless it is there, and return it.

    `spread` is about the standard deviation of its logits. Without, they are as flat as freshly drawn weights are.
    """
    if not (directory / "config.json").exists():
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(qwen3_config(size), dtype=torch.bfloat16, trust_remote_code=False)
        if spread is not None:
            drawn = model.config.initializer_range * model.config.hidden_size**0.5
            model.model.norm.weight.data *= spread / drawn
        model.save_pretrained(directory)
    return directory


def save_words(directory: Path, vocabulary: int) -> Path:
    """Write a tokenizer of whole words, from `w0` to the last of the vocabulary, unless it is there."""
    if not (directory / "tokenizer.json").exists():
        words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
        tokenizer.save_pretrained(directory)
    return directory
