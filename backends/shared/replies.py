"""Checks what a server replied before anything else sees it. Pure; checks raise `PoisonedReplyError`.

A NaN log-probability or a missing row would otherwise end up in a loss. If a reply says something twice, the numbers
are compared: a row's probabilities with their sum, a token's own log-probability with that in its row.

Servers that give no entropy serve a top-K, from which scores get bounds of it. All K served tokens tighten the bounds,
also those beyond the requested k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.errors import PermanentError, PoisonedReplyError
from spot_async.models.entropy import entropy_bounds
from spot_async.types import (
    BoolArray,
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    ScoredPositions,
    TokenScores,
    WeightVersion,
)

LOGPROB_SLACK = 1e-3  # rounding may put the log-probability of a sure token above 0
LEAST_NATS = -1e4  # least log-probability of a sampled or given token, because a loss takes its exponential
ENTROPY_SLACK_NATS = 1e-2
MASS_SLACK = 0.05  # a row's probabilities may sum to 1 plus this, because each may be rounded to bfloat16
AGREEMENT_NATS = 0.05  # largest difference between a token's log-probability and the same token's in its row
ABORTED = frozenset({"abort", "error"})  # finish reasons of vLLM and SGLang, in replies of status 200

T = TypeVar("T")


def only(choices: Sequence[T]) -> T:
    """Return the only choice of a reply to a request for one."""
    if len(choices) != 1:
        raise PoisonedReplyError(f"{len(choices)} choices where 1 was asked for")
    return choices[0]


def check_generation(
    reply: Generation, sampling: SamplingSettings, *, top_k: int, vocab_size: int, is_retokenized: bool = False
) -> Generation:
    """Check a whole response: there must be as many log-probabilities and versions as tokens.

    A response without a stop token must have all requested tokens, or it was cut short. This does not hold if we made
    the tokens of a text ourselves (`is_retokenized`). Returns the response with the finish reason that its last token
    decides, because some servers say "length" if the last allowed token is a stop token.
    """
    count = len(reply.token_ids)
    if not 0 < count <= sampling.max_tokens:
        raise PoisonedReplyError(f"{count} tokens where 1 to {sampling.max_tokens} were asked for")
    _check_ids("token_ids", reply.token_ids, (count,), min(vocab_size, sampling.vocab_limit or vocab_size))
    check_logprobs("logprobs", reply.logprobs, (count,), least=LEAST_NATS)
    last = int(reply.token_ids[-1])
    if reply.finish_reason == "stop" and last not in sampling.stop_token_ids:
        raise PoisonedReplyError(f"finish reason 'stop' does not fit the last token {last}")
    if last not in sampling.stop_token_ids and count < sampling.max_tokens and not is_retokenized:
        raise PoisonedReplyError(f"ends after {count} of {sampling.max_tokens} tokens, without a stop token")
    passed = np.flatnonzero((reply.token_ids[:-1, None] == np.array(sampling.stop_token_ids)).any(axis=1))
    if passed.size:
        raise PoisonedReplyError(f"continues after stop token {reply.token_ids[passed[0]]} at token {passed[0] + 1}")
    ends = [span.end for span in reply.version_spans]
    starts = [span.start for span in reply.version_spans]
    if not (ends and starts == [0, *ends[:-1]] and ends == sorted(ends) and ends[-1] == count):
        spans = list(zip(starts, ends, strict=True))
        raise PoisonedReplyError(f"version spans {spans} do not cover the {count} tokens")
    if any(span.version is None for span in reply.version_spans):
        raise PoisonedReplyError("a version span names no weights")
    if top_k:
        ids, logprobs = check_topk(reply.topk_ids, reply.topk_logprobs, (count, top_k), vocab_size)
        _check_agreement(reply.token_ids, reply.logprobs, ids, logprobs)
    return msgspec.structs.replace(reply, finish_reason="stop" if last in sampling.stop_token_ids else "length")


def check_end(name: str, generation: Generation, sampling: SamplingSettings) -> None:
    """Raise `PermanentError` if the served model's own end token, and none of the request's, ended the response."""
    last = int(generation.token_ids[-1]) if len(generation.token_ids) else None
    if generation.finish_reason == "stop" and last not in sampling.stop_token_ids:
        raise PermanentError(
            f"{name}: the server ends responses at token {last}, which is none of the end tokens "
            f"{sampling.stop_token_ids}: name it in the model's generation_config.json (eos_token_id)"
        )


def check_scores(reply: TokenScores, response_ids: IntArray, *, top_k: int, vocab_size: int) -> TokenScores:
    """Check scores: one row per response token, and entropies between 0 and log V. Returns them."""
    count = len(response_ids)
    valid: BoolArray = np.ones(count, np.bool_) if reply.valid is None else reply.valid
    _check_shape("valid", valid, (count,))
    if valid.dtype.kind != "b":
        raise PoisonedReplyError(f"valid is {valid.dtype}, not true or false")
    check_logprobs("logprobs", reply.logprobs, (count,), least=LEAST_NATS)
    ids, logprobs = check_topk(reply.topk_ids, reply.topk_logprobs, (count, top_k), vocab_size, valid)
    _check_agreement(response_ids[valid], reply.logprobs[valid], ids[valid], logprobs[valid])
    if reply.tail_logprobs is not None:
        _check_tails(reply.tail_logprobs, logprobs, valid)
    for name in ("entropy", "entropy_lower", "entropy_upper"):
        _check_entropy(name, getattr(reply, name), (count,), vocab_size)
    ordered = (reply.entropy_lower <= reply.entropy) & (reply.entropy <= reply.entropy_upper)
    if not ordered.all():
        raise PoisonedReplyError("entropy lies outside its own bounds")
    return reply


def check_rows(
    token_ids: IntArray,
    logprobs: FloatArray,
    topk_ids: IntArray,
    topk_logprobs: FloatArray,
    *,
    top_k: int,
    vocab_size: int,
) -> None:
    """Check one row per token (T,): its log-probability (T,) and its top-k (T, k), as a server gave them."""
    check_logprobs("logprobs", logprobs, (len(token_ids),), least=LEAST_NATS)
    check_topk(topk_ids, topk_logprobs, (len(token_ids), top_k), vocab_size)
    _check_agreement(token_ids, logprobs, topk_ids, topk_logprobs)


def check_candidates(logprobs: FloatArray, candidate_ids: IntArray) -> FloatArray:
    """Check the log-probabilities (N, k) of candidates (N, k). Returns them."""
    check_logprobs("candidate log-probabilities", logprobs, candidate_ids.shape)
    return logprobs


def check_logprobs(name: str, values: FloatArray, shape: tuple[int, ...], *, least: float = -math.inf) -> None:
    """Check that log-probabilities are finite, not above 0 except by rounding, and not below `least`."""
    _check_shape(name, values, shape)
    if values.dtype.kind != "f":
        raise PoisonedReplyError(f"{name} are {values.dtype}, not floating point")
    lowest, highest = float(values.min(initial=0.0)), float(values.max(initial=0.0))  # NaN if there is one
    if not highest <= LOGPROB_SLACK:
        raise PoisonedReplyError(f"{name} hold {'NaN' if math.isnan(highest) else 'values above 0'}")
    if math.isinf(lowest):
        raise PoisonedReplyError(f"{name} hold minus infinity")
    if lowest < least:
        raise PoisonedReplyError(f"{name} hold {lowest:g}, and no token is less likely than {least:g}")


def check_topk(
    ids: IntArray | None,
    logprobs: FloatArray | None,
    shape: tuple[int, int],
    vocab_size: int,
    valid: BoolArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """Check that each row has different tokens, likeliest first, with at most all probability.

    `valid` (T,) says which rows count. Returns the top-k.
    """
    if ids is None or logprobs is None:
        raise PoisonedReplyError("no top-k although it was asked for")
    _check_ids("topk_ids", ids, shape, vocab_size)
    check_logprobs("topk_logprobs", logprobs, shape)
    if not (logprobs[:, 1:] <= logprobs[:, :-1]).all():
        raise PoisonedReplyError("topk_logprobs do not descend")
    counting_ids, counting = (ids, logprobs) if valid is None else (ids[valid], logprobs[valid])
    ordered = np.sort(counting_ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise PoisonedReplyError("topk_ids name a token twice in one row")
    if (np.exp(counting).sum(axis=1) > 1.0 + MASS_SLACK).any():
        raise PoisonedReplyError("topk_logprobs hold a row of probabilities that exceed 1 together")
    return ids, logprobs


def _check_agreement(token_ids: IntArray, logprobs: FloatArray, topk_ids: IntArray, topk_logprobs: FloatArray) -> None:
    """Check that a token in its row's top-k (T, K) has the log-probability there, and any other none above them."""
    if not topk_ids.size:
        return
    named = topk_ids == token_ids[:, None]
    in_row = np.where(named, topk_logprobs, -np.inf).max(axis=1)
    off = np.where(named.any(axis=1), np.abs(logprobs - in_row), logprobs - topk_logprobs[:, -1])
    if (off > AGREEMENT_NATS).any():
        raise PoisonedReplyError(f"logprobs and topk_logprobs contradict each other at token {int(np.argmax(off))}")


def _check_tails(tails: FloatArray, topk_logprobs: FloatArray, valid: BoolArray) -> None:
    """Check that a row's top-k (T, K) and its tail (T,), which may be nothing, have all probability together."""
    _check_shape("tail_logprobs", tails, (len(topk_logprobs),))
    if tails.dtype.kind != "f":
        raise PoisonedReplyError(f"tail_logprobs are {tails.dtype}, not floating point")
    if not (tails <= LOGPROB_SLACK).all():  # false for NaN too
        raise PoisonedReplyError(f"tail_logprobs hold {'NaN' if np.isnan(tails).any() else 'values above 0'}")
    together = np.exp(topk_logprobs).sum(axis=1) + np.exp(tails)
    if (np.abs(together - 1.0) > MASS_SLACK)[valid].any():
        raise PoisonedReplyError("topk_logprobs and tail_logprobs hold a row of probabilities that are not 1 together")


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


def _check_shape(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise PoisonedReplyError(f"{name} have shape {array.shape} instead of {shape}")


def bounded_scores(
    logprobs: FloatArray,
    topk_ids: IntArray,
    topk_logprobs: FloatArray,
    *,
    top_k: int,
    vocab_size: int,
    version: WeightVersion,
) -> TokenScores:
    """Return scores of T tokens from log-probabilities (T,) and a served top-K (T, K), cut to the requested `top_k`.

    Raises `PoisonedReplyError` for numbers that are not log-probabilities, from which no bounds could be computed.
    """
    lower, upper = _bounds(topk_logprobs, vocab_size)
    return TokenScores(
        logprobs=logprobs,
        topk_ids=topk_ids[:, :top_k],
        topk_logprobs=topk_logprobs[:, :top_k],
        entropy=((lower + upper) / 2).astype(np.float32),
        entropy_lower=lower,
        entropy_upper=upper,
        version=version,
    )


def scored_positions(tops: Iterable[tuple[IntArray, FloatArray]], *, top_k: int, vocab_size: int) -> ScoredPositions:
    """Return positions from the top-K (1, K) of each, ids and log-probabilities, which were asked for singly.

    Raises `PoisonedReplyError`, as `bounded_scores`.
    """
    none = np.zeros((0, top_k), np.int32), np.zeros((0, top_k), np.float32)
    topk_ids, topk_logprobs = (np.concatenate(each) for each in zip(none, *tops, strict=True))
    lower, upper = _bounds(topk_logprobs, vocab_size)
    return ScoredPositions(topk_ids=topk_ids, topk_logprobs=topk_logprobs, entropy_lower=lower, entropy_upper=upper)


def _bounds(topk_logprobs: FloatArray, vocab_size: int) -> tuple[FloatArray, FloatArray]:
    """Return bounds (T,) of the served row's entropy. Whoever means another computation of it widens them by noise."""
    check_logprobs("topk_logprobs", topk_logprobs, topk_logprobs.shape)
    if not topk_logprobs.size:  # nothing was served
        rows = len(topk_logprobs)
        return np.zeros(rows, np.float32), np.full(rows, math.log(vocab_size), np.float32)
    lower, upper = (
        np.clip(each, 0.0, math.log(vocab_size)).astype(np.float32)
        for each in entropy_bounds(topk_logprobs, vocab_size)
    )
    return np.minimum(lower, upper), upper
