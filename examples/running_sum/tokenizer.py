"""Builds the 48-token vocabulary of the running sum as a Hugging Face tokenizer.

Strategy words, connectives and `\\boxed` are one token each; numbers are spelt digit by digit. Blanks have no token.
Encoding drops them, and decoding puts them back around words, so that decoded text reads and encodes like the text that
`task.write_solution` wrote. The chat template frames one or more turns with role tokens.

The tokenizer that *joins* is for runs with two tokenizers (examples/own_tokenizer): numbers of two digits are one
token, and all ids behind them are others. It decodes to the bytes of its tokens alone, since only such a tokenizer says
which these are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import task
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT, UNKNOWN = SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>")
WORDS = ("\\boxed", *task.STRATEGIES, *task.CONNECTIVES)
VOCABULARY_SIZE = 48
CONTEXT_TOKENS = 512

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def vocabulary(*, joins: bool = False) -> dict[str, int]:
    """Return ids by token. Reserved tokens fill the table up to VOCABULARY_SIZE."""
    tokens = [*SPECIAL_TOKENS, *"0123456789+-={}", *WORDS, *task.LABELS]
    tokens += [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(tokens))]
    if joins:
        tokens[len(SPECIAL_TOKENS) : len(SPECIAL_TOKENS)] = map(str, range(10, task.LARGEST_SUM + 1))
    return {token: token_id for token_id, token in enumerate(tokens)}


def build_tokenizer(*, joins: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(vocabulary(joins=joins), unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    # Split at known words, not at any run of letters: without blanks, a strategy touches the label after it ("oneb15").
    numbers = ["[1-3][0-9]"] if joins else []
    pieces = Regex("|".join([*map(re.escape, WORDS), *numbers, "."]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    blanks = [decoders.Replace(word, f"{word} ") for word in task.STRATEGIES]
    blanks += [decoders.Replace(word, f" {word} ") for word in task.CONNECTIVES]
    tokenizer.decoder = decoders.ByteLevel() if joins else decoders.Sequence([*blanks, decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def save_tokenizer(directory: Path, *, joins: bool = False) -> None:
    build_tokenizer(joins=joins).save_pretrained(directory)
    # transformers 5 writes a class name that version 4, which inference servers may still use, does not know.
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def chat(problem_text: str) -> list[dict[str, str]]:
    """Return the conversation that asks for a solution of one problem."""
    return [{"role": "user", "content": problem_text}]
