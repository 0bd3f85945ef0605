"""The ways in which ranks compute attention: their names in transformers, in words, and which one to expect.

It imports no torch, so that a dry run can say it before there is a rank.
"""

from __future__ import annotations

from spot_async.config import TrainingConfig

PER_DOCUMENT = "spot_per_document"
ONE_CALL = "spot_one_call"
WORDS = {
    PER_DOCUMENT: "sdpa, one call for each document",
    ONE_CALL: "torch's varlen_attn (flash kernels), one call for a row of documents",
}


def attention_words(implementation: str) -> str:
    """Return in words how a model with this attention function attends."""
    return WORDS.get(implementation, f"{implementation}, rows padded to one length")


def expected_attention(training: TrainingConfig, *, on_gpus: bool, has_varlen: bool) -> str:
    """Return in words how ranks will attend. What only they can try is said too."""
    if training.packing is False:
        return attention_words("sdpa")
    each = attention_words(PER_DOCUMENT)
    if on_gpus and has_varlen and training.dtype == "bfloat16":
        return f"{attention_words(ONE_CALL)}; {each}, if a trial of it fails"
    return each
