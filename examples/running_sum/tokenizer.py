"""The 48-token vocabulary of the running sum as a Hugging Face tokenizer.

Strategy words, connectives and `\\boxed` are one token each, numbers are spelt digit by digit. Blanks carry no token: they
are dropped on the way in and put back around words on the way out, so that decoded text reads like, and encodes like,
the text that `task.write_solution` wrote. The chat template frames one or more turns with role tokens.
"""

from __future__ import annotations

import re

import task
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT, UNKNOWN = SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>")
VOCABULARY_SIZE = 48
CONTEXT_TOKENS = 512

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def vocabulary() -> dict[str, int]:
    """Token to id; reserved tokens fill the table up to VOCABULARY_SIZE."""
    words = ("\\boxed", *task.STRATEGIES, *task.CONNECTIVES)
    tokens = [*SPECIAL_TOKENS, *"0123456789+-={}", *words, *task.LABELS]
    tokens += [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(tokens))]
    return {token: token_id for token_id, token in enumerate(tokens)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = ("\\boxed", *task.STRATEGIES, *task.CONNECTIVES)
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    # Known words, not any run of letters: without blanks a strategy and the label after it touch ("oneb15").
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, words), "."])), "isolated")
    blanks = [decoders.Replace(word, f"{word} ") for word in task.STRATEGIES]
    blanks += [decoders.Replace(word, f" {word} ") for word in task.CONNECTIVES]
    tokenizer.decoder = decoders.Sequence([*blanks, decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def chat(problem_text: str) -> list[dict[str, str]]:
    """The conversation that asks for a solution of one problem."""
    return [{"role": "user", "content": problem_text}]
