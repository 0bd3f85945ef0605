"""Checks what a server replied before anything else sees it. Pure; every check raises `PoisonedReplyError`.

A NaN log-probability or a missing row that got through would end up in a loss.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.errors import PoisonedReplyError
from spot_async.types import FloatArray, Generation, IntArray, SamplingSettings, ScoredPositions, TokenScores

LOGPROB_SLACK = 1e-3  # rounding may put the log-probability of a sure token above 0
ENTROPY_SLACK_NATS = 1e-2


def check_generation(reply: Generation, sampling: SamplingSettings, *, top_k: int, vocab_size: int) -> Generation:
    """A whole response: its tokens, their log-probabilities and versions, as many as each other.

    Returns it with the finish reason that its last token decides: some servers call a response whose last allowed
    token is a stop token cut off.
    """
    count = len(reply.token_ids)
    if not 0 < count <= sampling.max_tokens:
        raise PoisonedReplyError(f"{count} tokens where 1 to {sampling.max_tokens} were asked for")
    _check_ids("token_ids", reply.token_ids, (count,), vocab_size)
    _check_logprobs("logprobs", reply.logprobs, (count,))
    last = int(reply.token_ids[-1])
    if reply.finish_reason == "stop" and last not in sampling.stop_token_ids:
        raise PoisonedReplyError(f"finish reason 'stop' does not fit the last token {last}")
    passed = np.flatnonzero((reply.token_ids[:-1, None] == np.array(sampling.stop_token_ids)).any(axis=1))
    if passed.size:
        raise PoisonedReplyError(f"goes on after stop token {reply.token_ids[passed[0]]}, token {passed[0] + 1} of it")
    ends = [span.end for span in reply.version_spans]
    starts = [span.start for span in reply.version_spans]
    if not (ends and starts == [0, *ends[:-1]] and ends == sorted(ends) and ends[-1] == count):
        spans = list(zip(starts, ends, strict=True))
        raise PoisonedReplyError(f"version spans {spans} do not cover the {count} tokens")
    if top_k:
        _check_topk(reply.topk_ids, reply.topk_logprobs, (count, top_k), vocab_size)
    return msgspec.structs.replace(reply, finish_reason="stop" if last in sampling.stop_token_ids else "length")


def check_scores(reply: TokenScores, response_ids: IntArray, *, top_k: int, vocab_size: int) -> None:
    """One row per response token, full-vocabulary entropies between 0 and log V."""
    count = len(response_ids)
    _check_logprobs("logprobs", reply.logprobs, (count,))
    _check_topk(reply.topk_ids, reply.topk_logprobs, (count, top_k), vocab_size)
    for name in ("entropy", "entropy_lower", "entropy_upper"):
        _check_entropy(name, getattr(reply, name), (count,), vocab_size)
    ordered = (reply.entropy_lower <= reply.entropy) & (reply.entropy <= reply.entropy_upper)
    if not ordered.all():
        raise PoisonedReplyError("entropy lies outside its own bounds")


def check_scored_positions(reply: ScoredPositions, positions: IntArray, *, top_k: int, vocab_size: int) -> None:
    """One row per position that was asked for."""
    _check_topk(reply.topk_ids, reply.topk_logprobs, (len(positions), top_k), vocab_size)
    for name in ("entropy_lower", "entropy_upper"):
        _check_entropy(name, getattr(reply, name), (len(positions),), vocab_size)
    if not (reply.entropy_lower <= reply.entropy_upper).all():
        raise PoisonedReplyError("entropy_lower exceeds entropy_upper")


def check_candidates(logprobs: FloatArray, candidate_ids: IntArray) -> None:
    _check_logprobs("candidate log-probabilities", logprobs, candidate_ids.shape)


def _check_topk(ids: IntArray | None, logprobs: FloatArray | None, shape: tuple[int, ...], vocab_size: int) -> None:
    if ids is None or logprobs is None:
        raise PoisonedReplyError("no top-k although it was asked for")
    _check_ids("topk_ids", ids, shape, vocab_size)
    _check_logprobs("topk_logprobs", logprobs, shape)
    if not (logprobs[:, 1:] <= logprobs[:, :-1]).all():
        raise PoisonedReplyError("topk_logprobs do not descend")


def _check_entropy(name: str, values: FloatArray, shape: tuple[int, ...], vocab_size: int) -> None:
    _check_shape(name, values, shape)
    inside = (values >= -ENTROPY_SLACK_NATS) & (values <= math.log(vocab_size) + ENTROPY_SLACK_NATS)
    if not inside.all():
        raise PoisonedReplyError(f"{name} is not between 0 and log {vocab_size}")


def _check_ids(name: str, ids: IntArray, shape: tuple[int, ...], vocab_size: int) -> None:
    _check_shape(name, ids, shape)
    if ids.dtype.kind != "i":
        raise PoisonedReplyError(f"{name} are {ids.dtype}, not integers")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise PoisonedReplyError(f"{name} hold a token out of the {vocab_size}")


def _check_logprobs(name: str, values: FloatArray, shape: tuple[int, ...]) -> None:
    _check_shape(name, values, shape)
    if values.dtype.kind != "f":
        raise PoisonedReplyError(f"{name} are {values.dtype}, not floating point")
    if not (values <= LOGPROB_SLACK).all():  # NaN is not either
        raise PoisonedReplyError(f"{name} hold {'NaN' if np.isnan(values).any() else 'values above 0'}")


def _check_shape(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise PoisonedReplyError(f"{name} have shape {array.shape} instead of {shape}")
