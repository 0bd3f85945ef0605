"""Responses are cut and joined token by token, and keep account of who wrote each."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.models.responses import first_tokens, foreign, joined, token_of
from spot_async.types import Generation, IntArray, VersionSpan, WeightVersion

WRITERS = st.sampled_from([None, WeightVersion(0, 1), WeightVersion(0, 2)])


@st.composite
def pieces(draw: Callable[..., Any], *, least: int = 0) -> Generation:
    lengths = draw(st.lists(st.integers(1, 3), min_size=least, max_size=4))
    ends = np.cumsum(lengths).tolist()
    tokens, width = sum(lengths), draw(st.sampled_from([None, 2, 3]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Generation(
        token_ids=random.integers(0, 50, tokens).astype(np.int32),
        logprobs=-random.random(tokens).astype(np.float32),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        version_spans=tuple(
            VersionSpan(start, end, draw(WRITERS)) for start, end in zip([0, *ends[:-1]], ends, strict=True)
        )
        if tokens
        else (),
        topk_ids=None if width is None else random.integers(0, 50, (tokens, width)).astype(np.int32),
        topk_logprobs=None if width is None else -random.random((tokens, width)).astype(np.float32),
    )


def rows(response: Generation) -> list[Any]:
    """Each token with all that is known of it."""
    writers = [span.version for span in response.version_spans for _ in range(span.start, span.end)]
    return list(zip(response.token_ids.tolist(), response.logprobs.tolist(), writers, strict=True))


@given(st.lists(pieces(), min_size=1, max_size=5))
def test_a_joined_response_has_every_token_of_its_pieces_with_its_writer(given_pieces: list[Generation]) -> None:
    response = joined(*given_pieces)
    assert rows(response) == [row for piece in given_pieces for row in rows(piece)]
    assert response.finish_reason == given_pieces[-1].finish_reason
    spans = response.version_spans
    ends = [span.end for span in spans]
    assert [span.start for span in spans] == [0, *ends[:-1]][: len(spans)]  # in order, and without a gap
    assert all(one.version != other.version for one, other in pairwise(spans))
    written = [piece for piece in given_pieces if len(piece.token_ids)]
    widths = {None if piece.topk_ids is None else piece.topk_ids.shape[1] for piece in written}
    if written and len(widths) == 1 and None not in widths:
        np.testing.assert_array_equal(response.topk_ids, np.concatenate([piece.topk_ids for piece in written]))
        np.testing.assert_array_equal(
            response.topk_logprobs, np.concatenate([piece.topk_logprobs for piece in written])
        )
    elif written:
        assert response.topk_ids is None


@given(pieces(), st.integers(0, 14))
def test_the_first_tokens_are_those_and_have_no_end_unless_they_are_all(response: Generation, n: int) -> None:
    cut = first_tokens(response, n)
    assert rows(cut) == rows(response)[:n]
    assert cut.finish_reason == (response.finish_reason if n >= len(response.token_ids) else "length")
    assert rows(joined(cut, foreign(response)))[: len(cut.token_ids)] == rows(cut)
    if response.topk_ids is not None:
        np.testing.assert_array_equal(cut.topk_ids, response.topk_ids[:n])


@given(pieces())
def test_foreign_tokens_have_no_student(response: Generation) -> None:
    found = foreign(response)
    assert {row[2] for row in rows(found)} <= {None}
    assert [row[:2] for row in rows(found)] == [row[:2] for row in rows(response)]


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["a", " ", "é", "日", r"\boxed{", "}", "\n"]), min_size=1, max_size=40).map("".join),
    st.lists(st.integers(1, 5), min_size=1, max_size=200),
)
def test_the_token_of_a_character_is_found_though_tokens_are_parts_of_characters(text: str, lengths: list[int]) -> None:
    """A tokenizer of bytes, whose tokens have these lengths."""
    raw, pieces = text.encode(), list[bytes]()
    while raw:
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(raw[:length])
        raw = raw[length:]

    def decode(ids: IntArray) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    whole = np.arange(len(pieces), dtype=np.int32)
    for box in re.finditer(r"\\boxed", text):
        before = len(text[: box.start()].encode())
        expected = np.searchsorted(np.cumsum([len(piece) for piece in pieces]), before, side="right")
        assert token_of(whole, box.start(), decode) == expected
