"""Takes responses apart and puts them together, keeping account of who wrote which tokens. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from spot_async.types import BoolArray, Generation, IntArray, Supervision, VersionSpan, WeightVersion


def foreign(response: Generation) -> Generation:
    """Return a response as tokens that no student sampled: a teacher's, or the student's own behind another prompt."""
    spans = response.version_spans or (VersionSpan(0, len(response.token_ids), None),)
    written = [msgspec.structs.replace(span, version=None) for span in spans if span.start < span.end]
    return msgspec.structs.replace(response, version_spans=tuple(_merged(written)))


def read(token_ids: IntArray, top_k: int = 0) -> Generation:
    """Return what an environment wrote as a piece of a response. It has a top-k of placeholders if others have one."""
    shape = len(token_ids), top_k
    return Generation(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.zeros(len(token_ids), np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(0, len(token_ids), None, is_read=True),) if len(token_ids) else (),
        topk_ids=np.broadcast_to(np.arange(top_k, dtype=np.int32), shape) if top_k else None,
        topk_logprobs=np.zeros(shape, np.float32) if top_k else None,
    )


def oldest_version(response: Generation) -> WeightVersion | None:
    """Return the oldest weights of the student that sampled a token of the response; None where none did."""
    return min((span.version for span in response.version_spans if span.version is not None), default=None)


def counted_tokens(response: Generation | Supervision) -> BoolArray:
    """Return (T,) true where the token is part of an answer, and false where it was only read."""
    counted = np.ones(len(response.token_ids if isinstance(response, Generation) else response.response_ids), np.bool_)
    for span in response.version_spans:
        counted[span.start : span.end] = not span.is_read
    return counted


def sampled_tokens(response: Generation | Supervision) -> BoolArray:
    """Return (T,) true where a student sampled the token, so that it has a log pi_old; also if nobody says who did."""
    sampled = np.ones(len(response.token_ids if isinstance(response, Generation) else response.response_ids), np.bool_)
    for span in response.version_spans:
        sampled[span.start : span.end] = span.version is not None
    return sampled


def first_tokens(response: Generation, n: int) -> Generation:
    """Return the first `n` tokens of a response, which then has no end. One with no more than that stays as it is."""
    if n >= len(response.token_ids):
        return response
    spans = [msgspec.structs.replace(span, end=min(span.end, n)) for span in response.version_spans]
    return msgspec.structs.replace(
        response,
        token_ids=response.token_ids[:n].copy(),  # a view would keep the rest in memory
        logprobs=response.logprobs[:n].copy(),
        finish_reason="length",
        version_spans=tuple(span for span in spans if span.start < span.end),
        topk_ids=None if response.topk_ids is None else response.topk_ids[:n].copy(),
        topk_logprobs=None if response.topk_logprobs is None else response.topk_logprobs[:n].copy(),
    )


def token_of(token_ids: IntArray, character: int, decode: Callable[[IntArray], str]) -> int:
    """Return the position of the token that has a `character` of the response's text. Only its end is decoded again."""
    tail, end, reach = decode(token_ids)[character:], len(token_ids), 1
    while not decode(token_ids[-reach:]).endswith(tail):
        reach *= 2
    places = range(max(0, end - reach), end)
    return places[bisect.bisect_left(places, True, key=lambda t: not decode(token_ids[t:]).endswith(tail)) - 1]


def joined(*pieces: Generation) -> Generation:
    """Return one response of pieces, each of which continues those before it. It finishes as the last one does.

    It has a top-k at each token if every piece has one of the same width, but for those without tokens.
    """
    written = [piece for piece in pieces if len(piece.token_ids)] or list(pieces[-1:])
    spans: list[VersionSpan] = []
    start = 0
    for piece in written:
        for span in piece.version_spans:
            spans.append(msgspec.structs.replace(span, start=start + span.start, end=start + span.end))
        start += len(piece.token_ids)
    topk_ids = [piece.topk_ids for piece in written if piece.topk_ids is not None]
    topk_logprobs = [piece.topk_logprobs for piece in written if piece.topk_logprobs is not None]
    has_topk = len(topk_ids) == len(written) and len({ids.shape[1] for ids in topk_ids}) == 1
    return Generation(
        token_ids=np.concatenate([piece.token_ids for piece in written]),
        logprobs=np.concatenate([piece.logprobs for piece in written]),
        finish_reason=pieces[-1].finish_reason,
        version_spans=tuple(_merged(spans)),
        topk_ids=np.concatenate(topk_ids) if has_topk else None,
        topk_logprobs=np.concatenate(topk_logprobs) if has_topk else None,
    )


def _merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Return spans of which no two neighbours have the same writer."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and (merged[-1].version, merged[-1].is_read) == (span.version, span.is_read):
            merged[-1] = msgspec.structs.replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return merged
