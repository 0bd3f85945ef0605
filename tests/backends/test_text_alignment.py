"""Prompts as text: however a server tokenises our text, positions that are not masked are those that we asked about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spot_async.backends.openai.text_alignment import align, as_text
from spot_async.backends.shared.token_texts import UNKNOWN, TokenTexts
from spot_async.errors import ConfigError

WORDS = ["a", "b", " ", "ab", " a", " ab", "ba", "aa", "é", "世", "世界", "é ", " 世", "a世", "<", "ä¸"]
SPECIAL = ["<|end|>", "<|start|>"]
PADDED_TO = 8  # ids of the softmax beyond the tokenizer's


def make_tokenizer() -> Any:
    """Every byte, longer pieces that overlap in every way, bytes of characters joined with others, two specials."""
    letters = bytes_to_unicode()
    pieces = [word.encode() for word in WORDS] + [
        b"a\xe4",
        b"\xb8\x96",
        b"\x96a",
        b"\xa9 ",
        b" \xe4\xb8",
        b"\x96\xe7",
        b"\xe4\xb8",
    ]
    names = sorted(letters.values()) + ["".join(letters[byte] for byte in piece) for piece in pieces if len(piece) > 1]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[0], bos_token=SPECIAL[1])
    return tokenizer


TOKENIZER = make_tokenizer()
VOCAB = len(TOKENIZER) + PADDED_TO
TEXTS = TokenTexts(TOKENIZER, VOCAB)
CONTENT = {i: TEXTS.bytes_of[i] for i in range(len(TOKENIZER))}
SPECIAL_IDS = [TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL]
PIECES = [i for i, content in CONTENT.items() if content and i not in SPECIAL_IDS and not content.isascii()]
PLAIN = [i for i, content in CONTENT.items() if content and content in {word.encode() for word in WORDS}]
SPELT = [next(i for i, content in CONTENT.items() if content == bytes([byte])) for byte in SPECIAL[0].encode()]
ids_strategy = st.lists(
    st.one_of(
        *[st.sampled_from(PLAIN).map(lambda i: [i])] * 3,
        st.sampled_from(PIECES).map(lambda i: [i]),
        st.sampled_from(SPECIAL_IDS).map(lambda i: [i]),
        st.just(SPELT),  # a special token's text, written as plain characters
    ),
    min_size=1,
    max_size=14,
).map(lambda parts: [i for part in parts for i in part])


def cut(content: bytes, draw: Any, *, reads_specials: bool) -> list[int]:
    """Some tokenisation of a text: any pieces that add up to its bytes, specials as one or as plain text."""
    tokens, at = [], 0
    while at < len(content):
        fitting = [
            i for i, piece in CONTENT.items()
            if piece and content.startswith(piece, at) and (reads_specials or i not in SPECIAL_IDS)
        ]  # fmt: skip
        special = [i for i in fitting if i in SPECIAL_IDS]
        tokens.append(special[0] if special else draw(st.sampled_from(sorted(fitting))))
        at += len(CONTENT[tokens[-1]] or b"")
    return tokens


def written(tokens: list[int], convention: str) -> list[int]:
    """What is known of the tokens after a server has written them in one of the ways that servers do."""
    if convention == "ids":
        return tokens
    contents = [CONTENT[token] or b"" for token in tokens]
    if convention == "vocabulary":
        return TEXTS.ids_of(TOKENIZER.convert_ids_to_tokens(tokens))
    if convention == "replaced":
        return TEXTS.ids_of([content.decode(errors="replace") for content in contents])
    if convention == "escaped":
        return TEXTS.ids_of(
            [c.decode() if decodes(c) else "bytes:" + "".join(f"\\x{b:02x}" for b in c) for c in contents]
        )
    if convention == "latin":
        return TEXTS.ids_of([c.decode() if decodes(c) else c.decode("latin-1") for c in contents])
    if convention == "specials left out":
        return TEXTS.ids_of(["" if t in SPECIAL_IDS else CONTENT[t].decode(errors="replace") for t in tokens])  # type: ignore[union-attr]
    texts, held = [], b""  # "held": bytes wait until a character is whole
    for content in contents:
        held += content
        texts.append(held.decode() if decodes(held) else "")
        held = b"" if decodes(held) else held
    return TEXTS.ids_of(texts)


def decodes(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


CONVENTIONS = ["ids", "vocabulary", "replaced", "escaped", "latin", "specials left out", "held"]


@settings(max_examples=600)
@given(ids=ids_strategy, convention=st.sampled_from(CONVENTIONS), reads_specials=st.booleans(), data=st.data())
def test_unmasked_positions_are_the_tokens_we_asked_about_after_what_we_asked(
    ids: list[int], convention: str, reads_specials: bool, data: st.DataObject
) -> None:
    sent = as_text(np.array(ids, np.int32), TEXTS)
    truth = cut(sent.content, data.draw, reads_specials=reads_specials)
    aligned = align(sent, written(truth, convention), TEXTS)
    found = aligned.same

    ours = np.cumsum([0, *(len(CONTENT[i] or b"") for i in ids)])
    theirs = np.cumsum([0, *(len(CONTENT[i] or b"") for i in truth)])
    for position, at in enumerate(found.tolist()):
        if at < 0:
            continue
        assert truth[at] == ids[position]
        assert theirs[at] == ours[position]  # after the same text
        specials = [(s, i) for s, i in zip(ours, ids, strict=False) if i in SPECIAL_IDS and s < ours[position]]
        assert specials == [(s, i) for s, i in zip(theirs, truth, strict=False) if i in SPECIAL_IDS and s < theirs[at]]
    for chunk in set(aligned.ours[aligned.ours >= 0].tolist()):  # it has the same bytes on both sides
        own, other = (np.flatnonzero(each == chunk) for each in (aligned.ours, aligned.theirs))
        assert (ours[own[0]], ours[own[-1] + 1]) == (theirs[other[0]], theirs[other[-1] + 1])
        inner = {*ours[own[1:]].tolist()} & {*theirs[other[1:]].tolist()}
        assert not inner, "and could not be cut further"
    assert (aligned.ours[found >= 0] >= 0).all()


@settings(max_examples=100)
@given(ids=st.lists(st.sampled_from([*PLAIN, *SPECIAL_IDS]), min_size=1, max_size=14))
def test_nothing_is_masked_where_the_server_says_by_ids_that_it_read_ours(ids: list[int]) -> None:
    sent = as_text(np.array(ids, np.int32), TEXTS)
    assert sent.content == b"".join(CONTENT[i] or b"" for i in ids)
    np.testing.assert_array_equal(align(sent, ids, TEXTS).same, np.arange(len(ids)))


def token(text: str | bytes) -> int:
    content = text.encode() if isinstance(text, str) else text
    return next(i for i, each in CONTENT.items() if each == content)


def test_masks_are_no_larger_than_they_must_be() -> None:
    ids = [token("ab"), token(" a"), token("世"), token(" a"), token("b"), SPECIAL_IDS[0]]
    sent = as_text(np.array(ids, np.int32), TEXTS)
    merged = [token("a"), token("b"), *ids[1:]]  # one token of ours in two
    assert align(sent, merged, TEXTS).same.tolist() == [-1, 2, 3, 4, 5, 6]
    unnamed = [ids[0], ids[1], UNKNOWN, *ids[3:]]
    # the one after an unknown may carry bytes that the server held back
    assert align(sent, unnamed, TEXTS).same.tolist() == [0, 1, -1, -1, 4, 5]


def test_a_reply_that_cannot_be_the_texts_tokens_counts_only_up_to_where_it_fails() -> None:
    ids = [token("a"), token("a"), token("b"), token("b")]
    sent = as_text(np.array(ids, np.int32), TEXTS)
    assert align(sent, [ids[0], UNKNOWN, UNKNOWN, UNKNOWN, ids[2], ids[3]], TEXTS).same.tolist() == [0, -1, -1, -1]
    assert align(sent, [ids[0], ids[2], ids[2], ids[3]], TEXTS).same.tolist() == [0, -1, -1, -1]
    assert align(sent, ids[:2], TEXTS).same.tolist() == [0, 1, -1, -1]


def test_text_ends_where_it_cannot_carry_the_tokens() -> None:
    half, padding = token(b"\xe4"), len(TOKENIZER) + 1
    for broken in ([token("a"), half, token("b")], [token("a"), padding, token("b")]):
        sent = as_text(np.array(broken, np.int32), TEXTS)
        assert sent.text == "a"
        assert align(sent, [token("a")], TEXTS).same.tolist() == [0, -1, -1]


def test_special_tokens_read_as_plain_text_mask_everything_after_them() -> None:
    ids = [token("a"), SPECIAL_IDS[1], token("b")]
    sent = as_text(np.array(ids, np.int32), TEXTS)
    plain = [token(bytes([byte])) for byte in SPECIAL[1].encode()]
    assert align(sent, [ids[0], *plain, ids[2]], TEXTS).same.tolist() == [0, -1, -1]
    started = [SPECIAL_IDS[1], *ids]  # a start token of the server's own
    assert align(sent, started, TEXTS).same.tolist() == [-1, -1, -1]


def test_texts_that_several_tokens_may_be_written_as_name_none() -> None:
    assert TEXTS.id_of(" ab") == token(" ab")
    assert TEXTS.id_of("token_id:5") == 5
    assert TEXTS.id_of(f"token_id:{VOCAB}") == UNKNOWN
    assert TEXTS.id_of("\\xe4") == UNKNOWN
    assert TEXTS.id_of("bytes:\\xe4") == token(b"\xe4")
    assert TEXTS.id_of(SPECIAL[0]) == SPECIAL_IDS[0]
    assert TEXTS.id_of("世") == UNKNOWN  # also what the last byte of it is written as by servers that hold bytes back
    assert TEXTS.id_of("ä¸") == UNKNOWN  # also the numbers of the bytes of half a character
    for text in ("", "\N{REPLACEMENT CHARACTER}", "é", "no such token"):
        assert TEXTS.id_of(text) == UNKNOWN


def test_other_kinds_of_tokenizers_are_refused_in_one_line() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    with pytest.raises(ConfigError, match="use a server that takes and returns token ids"):
        TokenTexts(tokenizer, 2)
