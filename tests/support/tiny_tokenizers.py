"""Tokenizers of a few hundred tokens, in all pairs of a student's and a teacher's."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from spot_async.models.chunks import Reading
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.retokenizing import Encoder
from spot_async.testing.services import token_scores
from spot_async.types import BoolArray, IntArray, TokenScores

END, START, THINK = "<|im_end|>", "<|im_start|>", "<think>"
PADDED = 5  # ids of a softmax beyond the tokenizer's
TEXTS = st.text(st.sampled_from("ab1234 =.\n\u00e9\u4e16\u754c\U0001f600<|>hesum") | st.characters(codec="utf-8"))


def of_bytes(*corpus: str, normalizer: Any = None, specials: tuple[str, ...] = (END, START, THINK)) -> Any:
    """A byte-level BPE; the corpus makes its merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=specials[0], extra_special_tokens=[*specials[1:]])


def of_sentences() -> Any:
    """A SentencePiece Unigram: it puts a blank before whatever begins, and writes unknown characters in bytes."""
    pieces = ["▁", "a", "b", "ab", "▁a", "▁ab", "ba", "1", "2", "12", "123", "▁12", "é", "世", "世界", "▁世", "="]
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    vocabulary += [(piece, -1.0 - 1 / len(piece)) for piece in pieces]
    unigram = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    unigram.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    with_start = PreTrainedTokenizerFast(tokenizer_object=unigram, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", with_start.bos_token_id)]
    )
    return with_start


KINDS = {
    "numbers": of_bytes("123 1234 12 999 = 144 the sum is 10", "abab ab 世界 é 世界 é"),
    "words": of_bytes("the sum the theorem sum is", "世 ba ba aab  a  b"),
    "bytes": of_bytes(""),
    "sentences": of_sentences(),
}
NUMBERS, WORDS, BYTES, SENTENCES = KINDS.values()
ENCODERS = {kind: Encoder(tokenizer, len(tokenizer) + PADDED) for kind, tokenizer in KINDS.items()}
TABLES = {kind: encoder.table for kind, encoder in ENCODERS.items()}


def own(student: Any, teacher: Any, **settings: Any) -> OwnTokens:
    """A pair of tokenizers, or of their kinds."""
    both = [KINDS[each] if isinstance(each, str) else each for each in (student, teacher)]
    encoders = [ENCODERS[each] if isinstance(each, str) else Encoder(each, len(each)) for each in (student, teacher)]
    ends = {"student_ends": [both[0].eos_token_id], "teacher_ends": [both[1].eos_token_id]}
    return OwnTokens(*encoders, **(ends | settings))


PAIRS = {(one, other): own(one, other) for one in KINDS for other in KINDS}


def cut(kind: str, text: str) -> list[int]:
    """The tokens of a text in the midst of others."""
    before = "\n" if kind == "sentences" else ""
    found = [
        KINDS[kind].encode(each, add_special_tokens=False, split_special_tokens=True)
        for each in (before, before + text)
    ]
    return found[1][len(found[0]) :] if text else []


def response(kind: str, *parts: str | int, ends: bool = True) -> IntArray:
    """Texts and single tokens, and the end token unless it breaks off."""
    ids = [token_id for part in parts for token_id in (cut(kind, part) if isinstance(part, str) else [part])]
    return np.array([*ids, *([KINDS[kind].eos_token_id] if ends else [])], np.int32)


def said_of(reading: Reading, known: BoolArray | None = None) -> TokenScores:
    """What a teacher says of the tokens that it reads."""
    logprobs = -np.random.default_rng(len(reading.ids)).exponential(size=len(reading.ids)).astype(np.float32)
    return token_scores(logprobs, valid=known)
