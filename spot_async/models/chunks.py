"""Runs of response tokens that a teacher knows only as a whole, because it reads them in tokens of its own.

Chunks (T,) number them: tokens of a chunk have one number and stand together, and what is in none has `UNKNOWN`. None
in place of them: each token is a chunk. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spot_async.types import BoolArray, Float64Array, FloatArray, IntArray

UNKNOWN = -1  # in place of a chunk
NOTHING: IntArray = np.zeros(0, np.int32)
SURE_NATS = -1e-6  # a chunk of a likelier response is as good as certain, and its tokens share evenly


@dataclass(frozen=True)
class Reading:
    """A response as the teacher reads it. Chunks are numbered from 0 on both sides, in order and without gaps."""

    ids: IntArray  # (M,) what the teacher reads, up to the end of the last chunk
    theirs: IntArray  # (M,) the chunk of each of them
    ours: IntArray  # (T,) the chunk of each token of the response, or UNKNOWN
    our_starts: IntArray  # (T,) how many bytes of its chunk stand before each token of the response
    their_starts: IntArray  # (M,) likewise
    added_ids: IntArray  # (E,) the teacher's other ends, whose probabilities belong to that of the last token

    def joined(self, chunks: IntArray) -> Reading:
        """Return the reading where the teacher's tokens (M,) are known by chunks of their own, and each holds both."""
        is_border = (np.diff(self.theirs) != 0) & ((np.diff(chunks) != 0) | (chunks[1:] == UNKNOWN))
        theirs = np.concatenate([[0], np.cumsum(is_border)]).astype(np.int32)[: len(self.theirs)]
        of_own = np.append(theirs[np.unique(self.theirs, return_index=True)[1]], np.int32(UNKNOWN))  # the last: unknown
        return replace(self, theirs=theirs, ours=of_own[self.ours])

    def within(self, tokens: int) -> Reading:
        """Return the reading with those chunks alone of which the teacher reads no more than `tokens` tokens."""
        if len(self.ids) <= tokens:
            return self
        chunks = int(self.theirs[tokens])  # the first that does not fit
        kept = int(np.searchsorted(self.theirs, chunks))
        ours = np.where(self.ours < chunks, self.ours, UNKNOWN).astype(np.int32)
        return Reading(self.ids[:kept], self.theirs[:kept], ours, self.our_starts, self.their_starts[:kept], NOTHING)


def chunk_sums(values: FloatArray | Float64Array, chunks: IntArray | None) -> Float64Array:
    """Return for each token (T,) the sum of the values (T,) in its chunk; its own value where it is in none."""
    exact = values.astype(np.float64)
    if chunks is None:
        return exact
    _, places = np.unique(chunks, return_inverse=True)
    return np.where(chunks == UNKNOWN, exact, np.bincount(places, weights=exact)[places])


def whole_chunks(mask: BoolArray, chunks: IntArray | None) -> BoolArray:
    """Return where (T,) the mask (T,) is true for all tokens of the chunk. What holds for a part holds for no chunk."""
    return mask if chunks is None else chunk_sums((~mask).astype(np.float32), chunks) == 0


def chunk_means(values: FloatArray, chunks: IntArray | None) -> FloatArray:
    """Return for each token (T,) the mean of the values (T,) in its chunk."""
    if chunks is None:
        return values
    return (chunk_sums(values, chunks) / chunk_sums(np.ones_like(values), chunks)).astype(values.dtype)


def chunk_shares(logprobs: FloatArray, chunks: IntArray | None) -> Float64Array:
    """Return which part (T,) of its chunk's difference a token gets: in proportion to the student's log-probability.

    Parts of a chunk sum to 1. Rounding may put a log-probability above 0, and a chunk of next to certain tokens would
    be shared by rounding alone.
    """
    own = np.minimum(logprobs.astype(np.float64), 0.0)
    total, count = chunk_sums(own, chunks), chunk_sums(np.ones_like(own), chunks)
    return np.where(total < SURE_NATS, own / np.minimum(total, SURE_NATS), 1.0 / count)
