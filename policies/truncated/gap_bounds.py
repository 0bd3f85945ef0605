"""Bounds JS and the gap G when both policies' probabilities are only known within bounds. The intervals surely hold.

Pure numpy in float64. JS is jointly convex in the two renormalised policies P and Q. Each lies in a box and sums to 1.
Both extremes are bounded by linear programmes, whose duals give a true bound for any multiplier:

* From below, JS(P, Q) >= 1/2 sum P log r + Q log(2 - r) for every r in (0, 2), with equality at r = 2P / (P + Q).
* From above, a convex function on a box is at most its largest corner. This is applied term by term, and a price on the
  constraint "sums to 1" is taken off.

Both parts of the gap depend on the student's coverage A: a larger A leaves less mass missing, and also limits the share
that one candidate can have. So the interval of A is cut into slices, and each slice gets its own bounds.

Axes: T positions, J slices of coverage, k candidates.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from spot_async.types import Float64Array

SLICES = 8
SMALLEST_SLICE = 1e-3  # as a share of the largest coverage; for less coverage the shape is unknown anyway
BISECTIONS = 40
SLACK = 1e-11  # boxes and bounds are widened by this, which is more than the rounding of float64
TINY = 1e-300
LEAST_PROBABILITY = 1e-290  # float64 loses digits of smaller probabilities, so they count as anything from 0 to this
STEEPEST = 1e3  # no term of JS has a steeper slope; one that seems steeper is rounding, divided by a tiny width


class Pair(NamedTuple):
    lower: Float64Array  # (T,)
    upper: Float64Array  # (T,)


class Bounds(Protocol):
    """A `score_bounds.Interval`."""

    @property
    def lower(self) -> Float64Array: ...
    @property
    def upper(self) -> Float64Array: ...


def gap_bounds(
    share_lower: Float64Array,
    share_upper: Float64Array,
    student_lower: Float64Array,
    student_upper: Float64Array,
    coverage: Bounds,
    lambda_mass: float,
    lambda_shape: float,
) -> tuple[Pair, Pair]:
    """Return intervals (T,) of JS in bits, and of G = lambda_mass (1 - A) + lambda_shape JS.

    `share_*` (T, k) bound the teacher renormalised on its candidates, `student_*` (T, k) the student's full-vocabulary
    probabilities of the same candidates, and `coverage` (T,) their sum A.
    """
    student_lower = np.where(student_lower < LEAST_PROBABILITY, 0.0, student_lower)
    student_upper = np.maximum(student_upper, LEAST_PROBABILITY)
    edges = _slices(coverage)  # (T, J + 1)
    less, more = edges[:, :-1], edges[:, 1:]
    box_lower, box_upper = _share_box(student_lower, student_upper, less, more)  # (T, J, k)
    p_lower, p_upper = share_lower[:, None, :] * (1.0 - SLACK), share_upper[:, None, :] * (1.0 + SLACK)
    middle = (p_lower + p_upper) / 2.0
    middle = middle / np.maximum(middle.sum(axis=-1, keepdims=True), TINY)
    nearest = _nearest(middle, box_lower, box_upper)
    least = _at_least(middle, nearest, p_lower, p_upper, box_lower, box_upper) / np.log(2.0) - SLACK
    most = _at_most(middle, nearest, p_lower, p_upper, box_lower, box_upper) / np.log(2.0) + SLACK
    least, most = np.clip(least, 0.0, 1.0), np.clip(most, 0.0, 1.0)
    most = np.where(less <= 0.0, 1.0, most)  # JS counts as 1 for a student without any mass on the candidates
    low = lambda_mass * (1.0 - more) + lambda_shape * least
    high = lambda_mass * (1.0 - less) + lambda_shape * most
    return (
        Pair(least.min(axis=-1), most.max(axis=-1)),
        Pair(np.maximum(low.min(axis=-1) - SLACK, 0.0), np.minimum(high.max(axis=-1) + SLACK, 1.0)),
    )


def _slices(coverage: Bounds) -> Float64Array:
    """Return the slices' edges (T, J + 1), ascending from the least coverage to the most in equal ratios."""
    first = np.maximum(coverage.lower, SMALLEST_SLICE * coverage.upper)
    ratio = np.maximum(coverage.upper, TINY) / np.maximum(first, TINY)
    edges = first[:, None] * ratio[:, None] ** np.linspace(0.0, 1.0, SLICES + 1)
    edges[:, 0], edges[:, -1] = coverage.lower, coverage.upper
    return edges


def _share_box(
    lower: Float64Array, upper: Float64Array, less: Float64Array, more: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return bounds (T, J, k) of the student's shares where its coverage is between `less` and `more` (T, J)."""
    others_lower, others_upper = _sum_of_others(lower), _sum_of_others(upper)
    # Two bounds, of which the tighter counts: what the other candidates leave, and what the slice's total allows.
    alone_lower = lower / np.maximum(lower + others_upper, TINY)
    alone_upper = upper / (upper + others_lower)
    box_lower = np.maximum(alone_lower[:, None, :], lower[:, None, :] / np.maximum(more, TINY)[:, :, None])
    of_slice = upper[:, None, :] / np.maximum(less, TINY)[:, :, None]
    box_upper = np.minimum(alone_upper[:, None, :], of_slice)
    return np.clip(box_lower * (1.0 - SLACK), 0.0, 1.0), np.clip(box_upper * (1.0 + SLACK), 0.0, 1.0)


def _sum_of_others(values: Float64Array) -> Float64Array:
    """Return the sums (T, k) over all candidates but one, without subtracting, which would lose small candidates."""
    before, after = np.zeros_like(values), np.zeros_like(values)
    before[:, 1:] = np.cumsum(values[:, :-1], axis=-1)
    after[:, :-1] = np.cumsum(values[:, :0:-1], axis=-1)[:, ::-1]
    return before + after


def _nearest(middle: Float64Array, lower: Float64Array, upper: Float64Array) -> Float64Array:
    """Return the shares (T, J, k) in the box that are closest to `middle` in JS: a multiple of it, clipped.

    The multiple is found by bisection on its logarithm. An inexact result makes bounds wider, never wrong.
    """
    small, large = np.full(lower.shape[:2], -60.0), np.full(lower.shape[:2], 60.0)
    for _ in range(BISECTIONS):
        half = (small + large) / 2.0
        total = np.clip(middle * np.exp(half)[:, :, None], lower, upper).sum(axis=-1)
        small, large = np.where(total < 1.0, half, small), np.where(total < 1.0, large, half)
    return np.asarray(np.clip(middle * np.exp(large)[:, :, None], lower, upper))


def _at_least(
    p: Float64Array,
    q: Float64Array,
    p_lower: Float64Array,
    p_upper: Float64Array,
    q_lower: Float64Array,
    q_upper: Float64Array,
) -> Float64Array:
    """Return the lower bound (T, J) of JS in nats: the tangent at (p, q), minimised over both boxes."""
    r = np.clip(2.0 * p / np.maximum(p + q, TINY), 1e-12, 2.0 - 1e-12)
    of_p = _least_linear(np.log(r), p_lower, p_upper)
    of_q = _least_linear(np.log(2.0 - r), q_lower, q_upper)
    return np.asarray((of_p + of_q) / 2.0)


def _least_linear(slope: Float64Array, lower: Float64Array, upper: Float64Array) -> Float64Array:
    """Return the minimum (T, J) of sum(slope x) over lower <= x <= upper, sum(x) = 1: the dual's best breakpoint."""
    best: Float64Array = np.full(slope.shape[:-1], -np.inf)
    for i in range(slope.shape[-1]):
        level = slope[:, :, i : i + 1]
        rest = slope - level
        best = np.maximum(best, (rest * np.where(rest > 0.0, lower, upper)).sum(axis=-1) + level[:, :, 0])
    return np.asarray(best)


def _at_most(
    p: Float64Array,
    q: Float64Array,
    p_lower: Float64Array,
    p_upper: Float64Array,
    q_lower: Float64Array,
    q_upper: Float64Array,
) -> Float64Array:
    """Return the upper bound (T, J) of JS in nats: each term's largest corner, with a Lagrange price on "sums to 1"."""
    price = (p * 0.5 * np.log(np.maximum(2.0 * p / np.maximum(p + q, TINY), TINY))).sum(axis=-1, keepdims=True)

    def corner(share: Float64Array) -> Float64Array:
        return np.asarray(np.maximum(_term(p_lower, share) - price * p_lower, _term(p_upper, share) - price * p_upper))

    at_lower, at_upper = corner(q_lower), corner(q_upper)
    width = q_upper - q_lower
    slope = np.clip((at_upper - at_lower) / np.where(width > 0.0, width, 1.0), -STEEPEST, STEEPEST)
    best = np.full(slope.shape[:-1], np.inf)
    for i in range(slope.shape[-1]):
        level = slope[:, :, i : i + 1]
        terms = np.maximum(at_lower - level * q_lower, at_upper - level * q_upper)
        best = np.minimum(best, terms.sum(axis=-1) + level[:, :, 0])
    return np.asarray(best + price[:, :, 0])


def _term(p: Float64Array, q: Float64Array) -> Float64Array:
    """Return one candidate's part of JS in nats: 1/2 (p log(2p / (p + q)) + q log(2q / (p + q))), 0 at 0."""
    total = np.maximum(p + q, TINY)
    return 0.5 * (_times_log(p, 2.0 * p / total) + _times_log(q, 2.0 * q / total))


def _times_log(x: Float64Array, ratio: Float64Array) -> Float64Array:
    return x * np.log(np.where(x > 0.0, np.maximum(ratio, TINY), 1.0))
