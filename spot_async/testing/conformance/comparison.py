"""Compares served log-probabilities with exact ones. Pure numpy.

Axes: T response positions, K served top-k, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from spot_async.testing.conformance.contract import Violation
from spot_async.types import BoolArray, Float64Array, Int64Array, TokenScores

Rows = Float64Array  # exact log-probabilities (T, V)

INNER = slice(1, -1)  # all rows but the first and the last, which have checks of their own
ENDS = [0, -1]


def of_tokens(exact: Rows, token_ids: npt.ArrayLike) -> Float64Array:
    """Return the exact log-probabilities of token ids (T,) or (T, K), in the same shape."""
    ids = np.asarray(token_ids)
    return np.take_along_axis(exact, ids.reshape(len(exact), -1), axis=1).reshape(ids.shape)


def largest(served: npt.ArrayLike, exact: npt.ArrayLike) -> float:
    """Return the largest absolute difference in nats: infinite if there is a NaN, 0 for empty arrays."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.asarray(served, np.float64) - np.asarray(exact, np.float64))
    return float(np.where(np.isnan(difference), math.inf, difference).max(initial=0.0))


def largest_of_topk(exact: Rows, topk_ids: npt.ArrayLike, topk_logprobs: npt.ArrayLike) -> float:
    """Return `largest` for a top-k (T, K): for the served ids, and for the ids that should have been served.

    The order of two tokens with the same probability does not matter, so ids are judged by their log-probabilities.
    """
    served = np.asarray(topk_logprobs)
    best = -np.sort(-exact, axis=1)[:, : served.shape[1]]
    return max(largest(served, of_tokens(exact, topk_ids)), largest(served, best))


def known(scores: TokenScores) -> BoolArray:
    """Return which positions (T,) the server could score; an endpoint that reads text may tokenise some differently."""
    return np.ones(len(scores.logprobs), np.bool_) if scores.valid is None else scores.valid


def inner(scores: TokenScores) -> Int64Array:
    """Return the `known` positions but the first and the last, which have checks of their own."""
    positions = np.flatnonzero(known(scores))
    return positions[(positions > 0) & (positions < len(scores.logprobs) - 1)]


def require(holds: bool, otherwise: str, nats: float | None = None) -> None:
    if not holds:
        raise Violation(otherwise, nats)


def require_close(nats: float, tolerance_nats: float, what: str) -> None:
    require(nats <= tolerance_nats, f"{what} differ by up to {nats:.2g} nats from the model's", nats)


def nucleus_mass_before(exact: Rows, token_ids: npt.ArrayLike) -> Float64Array:
    """Return the probability (T,) of all tokens likelier than the sampled one, which is below `top_p` if honoured."""
    own = of_tokens(exact, token_ids)
    mass: Float64Array = np.where(exact > own[:, None], np.exp(exact), 0.0).sum(axis=1)
    return mass


def log_kept_mass(exact: Rows, top_p: float) -> Float64Array:
    """Return the log of the probability that sampling with `top_p` leaves, (T,)."""
    ordered = -np.sort(-np.exp(exact), axis=1)
    before = ordered.cumsum(axis=1) - ordered
    kept: Float64Array = np.log(np.where(before < top_p, ordered, 0.0).sum(axis=1))
    return kept


def entropy(exact: Rows) -> Float64Array:
    """Return the entropy of each row in nats, (T,)."""
    values: Float64Array = -(np.exp(exact) * np.where(np.isneginf(exact), 0.0, exact)).sum(axis=1)
    return values
