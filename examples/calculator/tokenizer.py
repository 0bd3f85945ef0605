"""Builds the 32-token vocabulary of the calculator as a Hugging Face tokenizer.

Numbers are spelt digit by digit. The JSON around them is two tokens, as common texts are few in larger vocabularies.
Blanks have no token: encoding drops them. The chat template leaves out what tools there are: the models know one only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, USER, ASSISTANT, TOOL, UNKNOWN = SPECIAL_TOKENS = (
    *("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>"),
)
CALL = ("<tool_call>", '{"name":"calculate","arguments":{"expression":"', '"}}', "</tool_call>")
WORDS = (*CALL, "\\boxed{")
VOCABULARY_SIZE = 32
CONTEXT_TOKENS = 512

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- (call['function']['arguments'] | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def vocabulary() -> dict[str, int]:
    """Return ids by token. Reserved tokens fill the table up to VOCABULARY_SIZE."""
    tokens = [*SPECIAL_TOKENS, *"0123456789+-*}", *WORDS]
    tokens += [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(tokens))]
    return {token: token_id for token_id, token in enumerate(tokens)}


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, WORDS), "."])), "isolated")
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
