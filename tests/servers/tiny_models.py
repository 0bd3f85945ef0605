"""Model directories small enough for any CPU and real enough for any inference server. Made without a network.

A random Qwen3 of about 140,000 parameters in float32, whose next-token distributions are peaked (a uniform one
would hide most mistakes), and a byte-level BPE tokenizer with a chat template that every model shares. The softmax is
wider than the tokenizer, as that of published models is.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

TOKENS = 480
VOCAB_SIZE = 512
END_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END_TOKEN]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUBJECTS = ["the sum", "the product", "one half", "a triangle", "our answer", "every prime", "this number", "a root"]
VERBS = ["equals", "divides", "is less than", "follows from", "is even because of", "cannot be", "adds up to"]


def make_model(directory: Path, *, seed: int, vocab_size: int = VOCAB_SIZE, **changes: Any) -> Path:
    """A model of its own weights for each seed; `changes` go to its Qwen3 configuration."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    config = Qwen3Config(
        **{**sizes, "vocab_size": vocab_size, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, **changes}
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.08)
        model.lm_head.weight.normal_(std=0.4)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_plain_model(directory: Path, *, seed: int) -> Path:
    """One that hardly ever writes anything but ASCII: bytes of longer characters have no text of their own, and
    half of these models' tokens are such."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    make_model(directory, seed=seed)
    model = Qwen3ForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for token_id in range(model.config.vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if not text or not text.isascii():
            model.lm_head.weight.data[token_id] = 0.0
    model.save_pretrained(directory)
    return directory


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_TOKEN, pad_token=SPECIAL_TOKENS[0], chat_template=CHAT_TEMPLATE
    )


def _sentences() -> list[str]:
    draw = random.Random(0)
    return [
        f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(SUBJECTS)}: {draw.randint(0, 999)} + "
        f"{draw.randint(0, 99)} = \\boxed{{{draw.randint(0, 9999)}}}.\n"
        for _ in range(2000)
    ]
