"""The bytes of each id of a tokenizer, byte-level or SentencePiece, as all current language models have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from spot_async.errors import ConfigError
from spot_async.types import BoolArray

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """The tables of one tokenizer. Raises ConfigError for one of another kind."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.bytes_of: list[bytes | None] = [None] * vocab_size  # None for ids without a token
        self.special: BoolArray = np.zeros(vocab_size, dtype=np.bool_)
        self.names: list[str | None] = [None] * vocab_size  # as the vocabulary has them
        added = self.added = tokenizer.added_tokens_decoder
        to_bytes = _byte_reader(tokenizer)
        for name, token_id in tokenizer.get_vocab().items():
            if token_id >= vocab_size:
                continue
            self.names[token_id] = name
            self.bytes_of[token_id] = name.encode() if token_id in added else to_bytes(name)
            self.special[token_id] = token_id in added and added[token_id].special
        self.unknown = tokenizer.unk_token_id  # what stands for any text that has no token
        self.outside = {self.unknown, tokenizer.bos_token_id, tokenizer.pad_token_id}  # in no response
        self.special_texts = tuple(text for text in np.array(self.bytes_of, dtype=object)[self.special] if text)

    def contents(self, ids: Iterable[int]) -> list[bytes]:
        """Return the bytes of each token, up to the first that has none."""
        contents: list[bytes] = []
        for token_id in ids:
            content = self.bytes_of[token_id] if token_id < len(self.bytes_of) else None  # no row in the softmax
            if content is None:
                break
            contents.append(content)
        return contents


def text_at_start(content: bytes) -> bytes:
    """Return the bytes up to the first that belongs to no character, or to one that is not finished."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content[: error.start]
    return content


def _byte_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes | None]:
    """Return a function from a token's name in the vocabulary to its bytes. Raises ConfigError for other tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = msgspec.json.decode(backend.to_str()) if backend is not None else {}
    decoder = model.get("decoder") or {}
    kinds = {each.get("type") for each in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in kinds:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # slow to import

        alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        return lambda name: bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else None
    if "ByteFallback" in kinds:
        return _sentencepiece_bytes
    raise ConfigError(
        f"{tokenizer.name_or_path}: only byte-level and SentencePiece tokenizers say which bytes a token has, and this "
        "is neither"
    )


def _sentencepiece_bytes(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
