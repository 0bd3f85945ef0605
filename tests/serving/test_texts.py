"""The text of tokens: of a response after its prompt, and of single ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import of_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spot_async.serving.openai.completion import TokenTexts


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: words with their space, other characters as bytes, the first space of a text dropped."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh", "▁a", "bc"]
    words = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [("▁", "a"), ("b", "c")], byte_fallback=True)
    )
    words.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


TOKENIZERS = {"byte_level": of_bytes("the other one then", "é and ü"), "byte_fallback": byte_fallback()}
# Characters of one to four bytes.
TEXTS = st.text(st.sampled_from("abcdh  é√€漢字🙂👩‍🚀"), max_size=24)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(prompt=TEXTS, response=TEXTS)
def test_a_response_continues_the_text_of_its_prompt(name: str, prompt: str, response: str):
    tokenizer = TOKENIZERS[name]
    before, after = ids_of(tokenizer, "a" + prompt), ids_of(tokenizer, response)
    found = TokenTexts(tokenizer).after(before, after)
    assert "\ufffd" not in found
    assert tokenizer.decode(before) + found == tokenizer.decode([*before, *after])


def test_bytes_that_are_no_character_are_shown():
    tokenizer = TOKENIZERS["byte_level"]
    half = ids_of(tokenizer, "漢")[:2]
    assert TokenTexts(tokenizer).after(ids_of(tokenizer, "a"), half) == "\ufffd"


def test_a_token_has_the_text_that_it_has_within_a_sentence():
    tokenizer = TOKENIZERS["byte_fallback"]
    texts = TokenTexts(tokenizer)
    word, end = tokenizer.convert_tokens_to_ids(["▁a", "</s>"])
    assert (texts.of(word), texts.of(end)) == (" a", "</s>")
