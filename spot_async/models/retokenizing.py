"""Reads a text that one tokenizer cut into tokens in the tokens of another.

The tokens that are given, the source's, are bytes. The target's tokenizer cuts the same bytes in its own way. Where
both have a border, a *chunk* ends. Tokens are matched by bytes, never by their texts. Where the bytes differ,
everything behind is unknown. Pure.

Axes: T tokens of the source, M of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING

import numpy as np

from spot_async.models.chunks import NOTHING, UNKNOWN, Reading
from spot_async.models.token_bytes import TokenBytes, text_at_start
from spot_async.types import IntArray

if TYPE_CHECKING:  # slow to import
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SENTINELS = ("\n", ".", "x")


class Encoder:
    """Cuts a text that stands behind other tokens. Special tokens in a text are the letters that spell them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Raises ConfigError for a tokenizer that does not say which bytes its tokens have."""
        self.table = TokenBytes(tokenizer, vocab_size)
        self._tokenizer = _literal(tokenizer)
        self.adds_blank = b"".join(self.table.contents(self._tokens("x"))).startswith(b" ")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; none if nobody can tell them.

        Some tokenizers put a blank before whatever begins. So the text begins with a sentinel there, whose tokens are
        dropped.
        """
        if not (self.adds_blank and text):
            return self._tokens(text)
        for sentinel in SENTINELS:
            ids = self._tokens(sentinel + text)
            for first in range(1, 4):
                if b"".join(self.table.contents(ids[:first])).lstrip(b" ") == sentinel.encode():
                    return ids[first:]
        return []

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens


class Retokenizer:
    """Two tokenizers, and what is equal in them besides text: special tokens, and the ends of responses."""

    def __init__(
        self, source: TokenBytes, target: Encoder, *, counterparts: Mapping[int, int], ends: Set[int], end: int
    ) -> None:
        """`ends` are the source's tokens that end a response, and `end` is the target's in their place."""
        self._source, self._target = source, target
        self._ends, self._end = ends, end
        self._counterparts = counterparts
        self._is_text = ~source.special
        self._is_text[list(counterparts)] = False

    def read(self, ids: IntArray, *, as_it_stands: bool = False, without: bytes = b"") -> Reading:
        """Return tokens (T,) in the target's.

        Where the text breaks off, the last chunk is unknown: had it gone on, the target might have cut it otherwise.
        What is to be read `as_it_stands` has that chunk too. `without` these bytes, if the text begins with them.
        """
        ended = len(ids) > 0 and int(ids[-1]) in self._ends
        read = ids[: len(ids) - ended]
        special = ~self._is_text[read]
        # Runs of text, and each special token by itself.
        cuts = np.flatnonzero(special[1:] | special[:-1]) + 1
        pieces = [piece for piece in np.split(read, cuts) if len(piece)]
        parts: list[Reading] = []
        for number, piece in enumerate(pieces, 1):
            token_id, dropped = int(piece[0]), without if number == 1 else b""
            if self._is_text[token_id]:
                breaks_off = not ended and number == len(pieces)
                parts.append(self._read_text(piece, dropped, breaks_off=breaks_off, as_it_stands=as_it_stands))
                if (parts[-1].ours == UNKNOWN).any():  # so is what stands behind it
                    break
            elif token_id in self._counterparts:
                parts.append(_one(self._counterparts[token_id]))
            else:
                break
        else:
            parts += [_one(self._end)] if ended else []
        first_chunks = np.cumsum([0, *(part.theirs.max(initial=UNKNOWN) + 1 for part in parts)])
        known = _joined(
            np.where(part.ours == UNKNOWN, UNKNOWN, part.ours + first)
            for part, first in zip(parts, first_chunks, strict=False)
        )
        return Reading(
            ids=_joined(part.ids for part in parts),
            theirs=_joined(part.theirs + first for part, first in zip(parts, first_chunks, strict=False)),
            ours=np.concatenate([known, np.full(len(ids) - len(known), UNKNOWN, np.int32)]),
            our_starts=np.pad(_joined(part.our_starts for part in parts), (0, len(ids) - len(known))),
            their_starts=_joined(part.their_starts for part in parts),
            added_ids=NOTHING,
        )

    def _read_text(self, ids: IntArray, dropped: bytes, *, breaks_off: bool, as_it_stands: bool) -> Reading:
        contents = self._source.contents(ids.tolist())
        contents[:1] = [content.removeprefix(dropped) for content in contents[:1]]
        content = b"".join(contents)
        text = text_at_start(content)
        is_cut = len(contents) < len(ids) or len(text) < len(content)
        their_ids = self._target.encode(text.decode())
        their_contents = self._target.table.contents(their_ids)
        equal = _equal_bytes(text, b"".join(their_contents))
        our_ends = np.cumsum([len(each) for each in contents], dtype=np.int64)
        their_ends = np.cumsum([len(each) for each in their_contents], dtype=np.int64)
        borders = np.intersect1d(our_ends, their_ends)
        is_open = (breaks_off or is_cut) and not as_it_stands
        last = equal - 1 if is_open and equal == len(text) else equal
        borders = borders[(borders > 0) & (borders <= last)]
        ours, our_starts = np.full(len(ids), UNKNOWN, np.int32), np.zeros(len(ids), np.int32)
        ours[: len(our_ends)] = np.searchsorted(borders, our_ends)
        ours[ours == len(borders)] = UNKNOWN
        theirs = np.searchsorted(borders, their_ends).astype(np.int32)
        theirs = theirs[theirs < len(borders)]
        first_bytes = np.concatenate([[0], borders])
        known = np.flatnonzero(ours != UNKNOWN)
        our_starts[known] = np.append(0, our_ends)[known] - first_bytes[ours[known]]
        their_starts = (np.append(0, their_ends)[: len(theirs)] - first_bytes[theirs]).astype(np.int32)
        return Reading(np.array(their_ids[: len(theirs)], np.int32), theirs, ours, our_starts, their_starts, NOTHING)


def _one(token_id: int) -> Reading:
    """Return the reading of a token that is another's counterpart."""
    zero = np.zeros(1, np.int32)
    return Reading(np.array([token_id], np.int32), zero, zero, zero, zero, NOTHING)


def _literal(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a tokenizer of its own that takes special tokens in a text for the letters that spell them."""
    from tokenizers import Tokenizer

    literal = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    literal.encode_special_tokens = True
    literal.no_truncation()
    literal.no_padding()
    return literal


def _equal_bytes(one: bytes, other: bytes) -> int:
    """Return how many bytes both have in common at their start."""
    length = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(np.argmax(differ)) if differ.any() else length


def _joined(parts: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
