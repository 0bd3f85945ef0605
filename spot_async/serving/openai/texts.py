"""Turns token ids into text: the part of each token in the text of a sequence, and the text of a token by itself."""

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


def pieces(decode: Decode, token_ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds after `context`. Joined they are the text of the whole sequence.

    A character that several tokens spell belongs to the last of them.
    """
    before, pending = list(context[-CONTEXT_TOKENS:]), list[int]()  # pending tokens are decoded after those before
    found: list[str] = []
    for left, token_id in enumerate(token_ids, start=1 - len(token_ids)):
        pending.append(token_id)
        piece = decode([*before, *pending])[len(decode(before)) :]
        if left and piece.endswith(REPLACEMENT) and len(pending) < MAX_PENDING_TOKENS:
            piece = ""
        if piece:
            before, pending = pending, []
        found.append(piece)
    return found


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
