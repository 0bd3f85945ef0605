"""Tables of a vocabulary's tokens: their bytes, and the texts by which servers name them.

Servers name tokens by decoded text, and different tokens can have the same text. So a text is resolved to a token only
if no other token could be written like that under any of the conventions below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from spot_async.errors import ConfigError
from spot_async.types import BoolArray

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

UNKNOWN = -1
TOKEN_ID_PREFIX = "token_id:"  # vLLM's return_tokens_as_token_ids


class TokenTexts:
    """The tables of one tokenizer, byte-level or SentencePiece, as all current language models have."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.bytes_of: list[bytes | None] = [None] * vocab_size  # None for ids without a token
        self.special: BoolArray = np.zeros(vocab_size, dtype=np.bool_)
        raw: list[str | None] = [None] * vocab_size
        added = tokenizer.added_tokens_decoder
        to_bytes = _byte_reader(tokenizer)
        for name, token_id in tokenizer.get_vocab().items():
            if token_id >= vocab_size:
                continue
            raw[token_id] = name
            self.bytes_of[token_id] = name.encode() if token_id in added else to_bytes(name)
            self.special[token_id] = token_id in added and added[token_id].special
        self.special_texts = tuple(text for text in np.array(self.bytes_of, dtype=object)[self.special] if text)
        self._ids = _unique_texts(raw, self.bytes_of)

    def id_of(self, text: str) -> int:
        """Return the only token that a server may have named so; `UNKNOWN` if there are several or none."""
        if text.startswith(TOKEN_ID_PREFIX) and text[len(TOKEN_ID_PREFIX) :].isdigit():
            token_id = int(text[len(TOKEN_ID_PREFIX) :])
            return token_id if token_id < len(self.bytes_of) else UNKNOWN
        return self._ids.get(text, UNKNOWN)

    def ids_of(self, texts: Iterable[str]) -> list[int]:
        return [self.id_of(text) for text in texts]


def _byte_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes | None]:
    """Return a function from a token's name in the vocabulary to its bytes. Raises ConfigError for other tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = msgspec.json.decode(backend.to_str()) if backend is not None else {}
    decoder = model.get("decoder") or {}
    kinds = {each.get("type") for each in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        return lambda name: bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else None
    if "ByteFallback" in kinds:
        return _sentencepiece_bytes
    raise ConfigError(
        f"{tokenizer.name_or_path}: this endpoint names tokens by text, and only byte-level and SentencePiece "
        "tokenizers can be compared with that: use a server that takes and returns token ids"
    )


def _sentencepiece_bytes(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character: printable bytes stand for themselves, others are moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(moved)}


def _unique_texts(raw: list[str | None], bytes_of: list[bytes | None]) -> dict[str, int]:
    """Return every text as which some token may be written, with its token, or `UNKNOWN` if there are several."""
    found: dict[str, int] = {}
    for token_id, (name, content) in enumerate(zip(raw, bytes_of, strict=True)):
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
