r"""Builds the 40-token vocabulary of the relay as a Hugging Face tokenizer, and the ids to learn from.

A state is one token, and so is `\boxed`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import task
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT, UNKNOWN = SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>")
VOCABULARY_SIZE = 40
CONTEXT_TOKENS = 64
STATES = [str(state) for state in range(task.STATES)]
TOKENS = [*SPECIAL_TOKENS, *STATES, "\\boxed", "{", "}", *task.METHODS, *task.CONNECTIVES, *task.OPERATIONS]
IGNORED = -100  # the label that cross entropy skips
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    reserved = {f"<|reserved_{i}|>": i for i in range(len(TOKENS), VOCABULARY_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(IDS | reserved, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
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


def save_tokenizer(directory: Path) -> None:
    build_tokenizer().save_pretrained(directory)
    # transformers 5 writes a class name that version 4, which inference servers may still use, does not know.
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def encode(
    starts: np.ndarray, operations: np.ndarray, written: task.Solutions, *, with_answers: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels (n, tokens). Only the solution is learned, without its slips.

    A prompt `with_answers` has the answer in braces behind the problem.
    """
    count, length = operations.shape
    first = {
        name: IDS[token] for name, token in (("state", "0"), ("operation", "a"), ("method", "W"), ("connective", "S"))
    }

    def column(token: str) -> np.ndarray:
        return np.full(count, IDS[token])

    answer = [column("{"), *(first["state"] + written.states[:, :, -1]).T, column("}")]
    prompt = [
        column("<|user|>"),
        first["state"] + starts,
        *(first["operation"] + operations).T,
        *(answer if with_answers else []),
        column("<|assistant|>"),
    ]
    ids, labels = list(prompt), [np.full(count, IGNORED) for _ in prompt]
    for j in range(length):
        states = first["state"] + written.states[:, j]
        line = [first["operation"] + operations[:, j], first["method"] + written.methods[:, j], *states.T,
                first["connective"] + written.connectives[:, j]]  # fmt: skip
        learned = [line[0], line[1], *np.where(~written.is_slip[:, j], states, IGNORED).T, line[-1]]
        ids += line
        labels += learned
    end = [column("\\boxed"), *answer, column("<|end|>")]
    return np.stack(ids + end, axis=1), np.stack(labels + end, axis=1)
