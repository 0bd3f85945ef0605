"""The texts by which servers name a vocabulary's tokens.

Servers name tokens by decoded text, and different tokens can have the same text. So a text is resolved to a token only
if no other token could be written like that under any of the conventions below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from spot_async.errors import ConfigError
from spot_async.models.token_bytes import TokenBytes

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

UNKNOWN = -1
TOKEN_ID_PREFIX = "token_id:"  # vLLM's return_tokens_as_token_ids


class TokenTexts(TokenBytes):
    """A tokenizer's tokens with the texts that name them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        try:
            super().__init__(tokenizer, vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{error}: use a server that takes and returns token ids") from error
        self._ids = _unique_texts(self.names, self.bytes_of)

    def id_of(self, text: str) -> int:
        """Return the only token that a server may have named so; `UNKNOWN` if there are several or none."""
        if text.startswith(TOKEN_ID_PREFIX) and text[len(TOKEN_ID_PREFIX) :].isdigit():
            token_id = int(text[len(TOKEN_ID_PREFIX) :])
            return token_id if token_id < len(self.bytes_of) else UNKNOWN
        return self._ids.get(text, UNKNOWN)

    def ids_of(self, texts: Iterable[str]) -> list[int]:
        return [self.id_of(text) for text in texts]


def _unique_texts(names: list[str | None], bytes_of: list[bytes | None]) -> dict[str, int]:
    """Return every text as which some token may be written, with its token, or `UNKNOWN` if there are several."""
    found: dict[str, int] = {}
    for token_id, (name, content) in enumerate(zip(names, bytes_of, strict=True)):
        if name is None or content is None:
            continue
        for text in _forms(name, content):
            if found.setdefault(text, token_id) != token_id:
                found[text] = UNKNOWN
    known = {content for content in bytes_of if content}
    for text in [text for text, token_id in found.items() if token_id != UNKNOWN and not text.isascii()]:
        if _may_end_a_character(text, known):
            found[text] = UNKNOWN
    return found


def _forms(name: str, content: bytes) -> Iterator[str]:
    """Yield all texts as which servers may write a token.

    They are its name in the vocabulary, its decoded text, and that text without a leading blank, which decoders of
    single tokens strip. Bytes of longer characters may be written as characters of the same numbers (SGLang) or escaped
    (OpenAI).
    """
    yield name
    try:
        text = content.decode()
    except UnicodeDecodeError:
        yield content.decode("latin-1")
        yield "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return
    if text:
        yield text
    if name[:1] == "\N{LOWER ONE EIGHTH BLOCK}" and len(text) > 1:
        yield text[1:]


def _may_end_a_character(text: str, known: set[bytes]) -> bool:
    """Return whether a token that has only the last bytes of the text's first character may be written like this.

    vLLM and others decode token by token. They hold bytes back until a character is whole, and write the whole
    character for the last of its tokens.
    """
    if text[0].isascii():
        return False
    content = text.encode()
    return any(content[cut:] in known for cut in range(1, len(text[0].encode())))
