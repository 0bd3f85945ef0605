"""Turns token ids into text while they arrive: pieces of text, stop strings, and the text of single tokens.

A piece is returned only once later tokens can no longer change it. A character may be spread over several tokens, and a
stop string over several pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]

# A response's first pieces are decoded after so many tokens of the prompt: a character and the space before it fit.
CONTEXT_TOKENS = 6
# Longer than any character. Bytes that are not a character after so many tokens never become one.
MAX_PENDING_TOKENS = 16
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Decode:
    """Return the tokenizer's decoding without those clean-ups that depend on what follows."""

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    return decode


class IncrementalText:
    """The text of a growing sequence in pieces. Joined they are the text of the whole sequence, without `context`."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._before = list(context[-CONTEXT_TOKENS:])  # the tokens after which pending ones are decoded
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now and was not before.

        How tokens are grouped into calls makes no difference, with one exception: if bytes are not characters, and the
        tokenizer has byte fallback, the number of replacement characters may differ.
        """
        pending = [*self._pending, *token_ids]
        piece = self._text(pending)
        if REPLACEMENT in piece and len(token_ids) > 1:  # incomplete somewhere, so go token by token to find where
            middle = len(token_ids) // 2
            return self.push(token_ids[:middle]) + self.push(token_ids[middle:])
        self._pending = pending
        if piece.endswith(REPLACEMENT) and len(pending) < MAX_PENDING_TOKENS:
            return ""
        return self._take(piece)

    def flush(self) -> str:
        """Return the rest of the text, when no more tokens come."""
        return self._take(self._text(self._pending))

    def _text(self, pending: Sequence[int]) -> str:
        return self._decode([*self._before, *pending])[len(self._decode(self._before)) :]

    def _take(self, piece: str) -> str:
        if piece:
            self._before, self._pending = self._pending, []
        return piece


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back text that may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.found = False
        self._strings = strings
        self._held = ""

    def push(self, piece: str) -> str:
        """Return the text that may be shown now: up to a stop string, or to what may be the beginning of one."""
        text = self._held + piece
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        self.found = bool(starts)
        shown = min(starts) if starts else len(text) - self._begun(text)
        self._held = "" if starts else text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        lengths = (n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n]))
        return max(lengths, default=0)


class TokenTexts:
    """The text of single tokens as inside a longer text: with the space before a word. Includes special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = decoder(tokenizer, skip_special_tokens=False)
        self._neighbour = tokenizer.encode("a", add_special_tokens=False)[-1:]  # any token will do
        self._neighbour_text = self._decode(self._neighbour)
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._decode([*self._neighbour, token_id]).removeprefix(self._neighbour_text)
            self._texts[token_id] = text
        return text
