"""Text from tokens that come one by one: nothing shown is taken back, nothing is lost, stop strings are found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spot_async.serving.openai.detokenizer import IncrementalText, StopStrings, TokenTexts, decoder


def byte_level() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    words.train_from_iterator(["the other one then", "é and ü"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>")


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


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
# Characters of one to four bytes.
TEXTS = st.text(st.sampled_from("abcdh  é√€漢字🙂👩‍🚀"), max_size=24)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(prompt=TEXTS, response=TEXTS, data=st.data())
def test_pieces_joined_continue_the_prompt_as_one_text(name: str, prompt: str, response: str, data: st.DataObject):
    tokenizer = TOKENIZERS[name]
    decode = decoder(tokenizer, skip_special_tokens=False)
    before, after = ids_of(tokenizer, "a" + prompt), ids_of(tokenizer, response)
    text = IncrementalText(decode, before)
    pieces = []
    while after:
        count = data.draw(st.integers(1, len(after)))
        pieces.append(text.push(after[:count]))
        assert "\ufffd" not in pieces[-1]
        after = after[count:]
    whole = decode([*before, *ids_of(tokenizer, response)])
    assert decode(before) + "".join(pieces) + text.flush() == whole


def test_bytes_that_are_no_character_are_shown_in_the_end():
    tokenizer = TOKENIZERS["byte_level"]
    half = ids_of(tokenizer, "漢")[:2]
    text = IncrementalText(decoder(tokenizer, skip_special_tokens=False), ids_of(tokenizer, "a"))
    assert text.push(half) == ""
    assert text.flush() == "\ufffd"
    shown = "".join(text.push(half) for _ in range(20))
    assert shown.count("\ufffd") >= 10, "must not be held back for ever"


@settings(max_examples=200)
@given(tokens=st.lists(st.integers(0, 269), max_size=14), data=st.data())
def test_text_is_the_same_however_its_tokens_arrive(tokens: list[int], data: st.DataObject):
    decode = decoder(TOKENIZERS["byte_level"], skip_special_tokens=False)
    one_by_one, grouped = IncrementalText(decode), IncrementalText(decode)
    expected = [one_by_one.push([token]) for token in tokens] + [one_by_one.flush()]
    found = []
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        found.append(grouped.push(tokens[:count]))
        tokens = tokens[count:]
    assert "".join([*found, grouped.flush()]) == "".join(expected)


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_is_shown_up_to_the_first_stop_string_and_no_further(pieces: list[str], stops: list[str]):
    finder = StopStrings(stops)
    shown, read = "", ""
    for piece in pieces:
        read += piece
        shown += finder.push(piece)
        starts = [read.find(stop) for stop in stops if stop in read]
        assert finder.found == bool(starts)
        if starts:
            assert shown == read[: min(starts)]
            return
        held = read.removeprefix(shown)
        assert read.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops), "no more is held back than need be"
    assert shown + finder.flush() == read


def test_a_token_has_the_text_that_it_has_within_a_sentence():
    tokenizer = TOKENIZERS["byte_fallback"]
    texts = TokenTexts(tokenizer)
    word, end = tokenizer.convert_tokens_to_ids(["▁a", "</s>"])
    assert (texts[word], texts[end]) == (" a", "</s>")
