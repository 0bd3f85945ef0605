"""Finds which of our tokens a server read as we meant them, after it tokenised a text that we sent.

Pure. Tokens are compared by the bytes that they cover. What cannot be placed with certainty is left out. A chunk
(`models/chunks.py`) counts only if everything before it is the same text with the same special tokens. How the text
before was cut into tokens may differ, and a single position counts only if the server's token there is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spot_async.models.token_bytes import text_at_start
from spot_async.types import Int64Array, IntArray

from ..shared.token_texts import UNKNOWN, TokenTexts

Spans = Int64Array  # (N, 2) first byte and the one after the last; -1 where unknown


@dataclass(frozen=True)
class SentText:
    """Token ids, and the text that was sent for them. The text ends before the first token that text cannot express."""

    token_ids: IntArray  # (N,) all of them
    content: bytes  # the text's bytes
    spans: Spans  # (N, 2) of each token in the text

    @property
    def text(self) -> str:
        return self.content.decode()


def as_text(token_ids: IntArray, texts: TokenTexts) -> SentText:
    """Return the text of token ids, up to the first byte that is no character's or the first id that is no token."""
    parts = texts.contents(token_ids.tolist())
    content = text_at_start(b"".join(parts))
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    spans = np.full((len(token_ids), 2), -1, dtype=np.int64)
    held = int(np.searchsorted(ends, len(content), side="right"))
    spans[:held, 1] = ends[:held]
    spans[:held, 0] = ends[:held] - [len(part) for part in parts[:held]]
    return SentText(token_ids, content, spans)


class Alignment(NamedTuple):
    """What of a text both cut at the same bytes. Chunks are numbered in order, -1 where a token is in none."""

    ours: IntArray  # (N,) the chunk of each of our tokens
    theirs: IntArray  # (M,) the chunk of each of the server's
    same: IntArray  # (N,) the server's token that is ours, alone in its chunk; -1 where there is none


def align(sent: SentText, server_ids: Sequence[int], texts: TokenTexts) -> Alignment:
    """Return the chunks of our tokens (N,) and of those that the server made of the text (M,).

    `server_ids` has `UNKNOWN` where the server did not say which token it is.
    """
    spans = _placed(sent.content, server_ids, texts)
    limit = _faithful_bytes(sent, spans, server_ids, texts)
    both = [_within(each, limit) for each in (sent.spans, spans)]
    borders = np.intersect1d(both[0][both[0] >= 0], both[1][both[1] >= 0])
    numbers = [np.where(each[:, 0] < 0, -1, np.searchsorted(borders, each[:, 0], side="right") - 1) for each in both]
    is_chunk = np.ones(len(borders) + 1, np.bool_)  # the last is that of tokens in none
    is_chunk[-2:] = False
    counts = []
    for each, own in zip(both, numbers, strict=True):  # a chunk's tokens have all of its bytes
        sizes = np.bincount(own[own >= 0], (each[:, 1] - each[:, 0])[own >= 0], len(borders))
        is_chunk[:-2] &= sizes[:-1] == np.diff(borders)
        counts.append(np.bincount(own[own >= 0], minlength=len(borders) + 1))
    ours, theirs = (np.where(is_chunk[own], own, -1).astype(np.int32) for own in numbers)
    of_chunk = np.full(len(borders) + 1, -1, np.int32)
    of_chunk[theirs[theirs >= 0]] = np.flatnonzero(theirs >= 0)
    same = np.where((counts[0][ours] == 1) & (counts[1][ours] == 1) & (ours >= 0), of_chunk[ours], -1)
    is_same = (same >= 0) & (np.append(np.array(server_ids, np.int64), UNKNOWN)[same] == sent.token_ids)
    return Alignment(ours, theirs, np.where(is_same, same, -1).astype(np.int32))


def _within(spans: Spans, limit: int) -> Spans:
    """Return the spans (N, 2) without those that have no bytes, or some beyond the limit."""
    is_within = (spans[:, 0] >= 0) & (spans[:, 1] <= limit) & (spans[:, 1] > spans[:, 0])
    return np.where(is_within[:, None], spans, -1)


def _placed(content: bytes, server_ids: Sequence[int], texts: TokenTexts) -> Spans:
    """Place the server's tokens in the text: forward from its start to the first unknown one, and back from its end."""
    spans = np.full((len(server_ids), 2), -1, dtype=np.int64)
    first, cursor = 0, 0
    while first < len(server_ids):
        part = _bytes_of(server_ids[first], texts)
        if not part:
            break
        if not content.startswith(part, cursor):
            return spans  # the server read another text, but up to here it agrees
        spans[first] = cursor, cursor + len(part)
        cursor += len(part)
        first += 1
    last, end = len(server_ids), len(content)
    from_end = spans.copy()
    while last > first:
        part = _bytes_of(server_ids[last - 1], texts)
        if not part:
            break
        if not content[:end].endswith(part) or end - len(part) < cursor:
            return spans
        from_end[last - 1] = end - len(part), end
        end -= len(part)
        last -= 1
    if last == first:
        return from_end if cursor == end else spans
    # A server that holds back the bytes of an unfinished character writes them with a later token. So the first token
    # after an unknown one may have more bytes than it seems. Every token in between has at least one byte.
    if last < len(server_ids):
        end, last = int(from_end[last, 1]), last + 1
        from_end[last - 1] = -1
    return from_end if end - cursor >= last - first else spans


def _faithful_bytes(sent: SentText, spans: Spans, server_ids: Sequence[int], texts: TokenTexts) -> int:
    """Return up to which byte the server read special tokens exactly where we meant them."""
    meant = {
        int(start): token_id
        for token_id, (start, _) in zip(sent.token_ids.tolist(), sent.spans.tolist(), strict=True)
        if start >= 0 and texts.special[token_id]
    }
    read = {int(start): server_ids[j] for j, (start, _) in enumerate(spans) if start >= 0}
    read_special = {start: token_id for start, token_id in read.items() if texts.special[token_id]}
    wrong = [start for start, token_id in meant.items() if read.get(start) != token_id]
    wrong += [start for start, token_id in read_special.items() if meant.get(start) != token_id]
    # Between placed parts the server may have read a special token where we meant plain text.
    placed = sorted((int(start), int(end)) for start, end in spans if start >= 0)
    starts = [0, *(end for _, end in placed)]
    ends = [*(start for start, _ in placed), len(sent.content)]
    unplaced = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    wrong += [start for start, end in unplaced if any(text in sent.content[start:end] for text in texts.special_texts)]
    return min(wrong, default=len(sent.content))


def _bytes_of(token_id: int, texts: TokenTexts) -> bytes | None:
    return texts.bytes_of[token_id] if 0 <= token_id < len(texts.bytes_of) and token_id != UNKNOWN else None
