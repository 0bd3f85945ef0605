"""Finds which of our tokens a server read as we meant them, after it tokenised a text that we sent.

Pure. Tokens are compared by the bytes that they cover. What cannot be placed with certainty is left out. A position
counts only if the server's token there is ours, and everything before it is the same text with the same special tokens.
How the text before was cut into tokens may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    parts: list[bytes] = []
    for token_id in token_ids.tolist():
        part = texts.bytes_of[token_id]
        if part is None:
            break
        parts.append(part)
    content = b"".join(parts)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        content = content[: error.start]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    spans = np.full((len(token_ids), 2), -1, dtype=np.int64)
    held = int(np.searchsorted(ends, len(content), side="right"))
    spans[:held, 1] = ends[:held]
    spans[:held, 0] = ends[:held] - [len(part) for part in parts[:held]]
    return SentText(token_ids, content, spans)


def align(sent: SentText, server_ids: Sequence[int], texts: TokenTexts) -> IntArray:
    """Return for each of our tokens (N,) the index in `server_ids` of the same token, or -1.

    `server_ids` are the tokens that the server made of the text; `UNKNOWN` where it did not say which.
    """
    spans = _placed(sent.content, server_ids, texts)
    limit = _faithful_bytes(sent, spans, server_ids, texts)
    at = {int(start): j for j, (start, _) in enumerate(spans) if start >= 0}
    found = np.full(len(sent.token_ids), -1, dtype=np.int32)
    for i, (token_id, (start, end)) in enumerate(zip(sent.token_ids.tolist(), sent.spans.tolist(), strict=True)):
        j = at.get(start, -1) if 0 <= start < limit else -1
        if j >= 0 and server_ids[j] == token_id and spans[j, 1] == end:
            found[i] = j
    return found


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
    unplaced = _unplaced(sent.content, spans)
    wrong += [start for start, end in unplaced if any(text in sent.content[start:end] for text in texts.special_texts)]
    return min(wrong, default=len(sent.content))


def _unplaced(content: bytes, spans: Spans) -> list[tuple[int, int]]:
    placed = sorted((int(start), int(end)) for start, end in spans if start >= 0)
    starts = [0, *(end for _, end in placed)]
    ends = [*(start for start, _ in placed), len(content)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _bytes_of(token_id: int, texts: TokenTexts) -> bytes | None:
    return texts.bytes_of[token_id] if 0 <= token_id < len(texts.bytes_of) and token_id != UNKNOWN else None
