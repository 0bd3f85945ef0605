"""Intervals of probabilities, entropies and the gap G when both policies are only known within bounds.

Pure numpy in float64. Intervals surely hold what they bound: they are widened for rounding, of float64 here, and of
log-probabilities that were sent as float32. They must be true, and need not be tight.

The gap is G = lambda_mass (1 - A) + lambda_shape JS. With the shares p and q of a candidate, JS is the sum over all
candidates of f(p, q) = 1/2 (p log(2p / (p + q)) + q log(2q / (p + q))). f is 0 where p = q, and its derivative by q,
1/2 log(2q / (p + q)), has the sign of q - p; the same holds for p. So f grows with the distance of p and q, on either
side. Where both lie in intervals, f is least at the nearest points of these, and largest at one of the two pairs of
opposite ends.

Shares q sum to 1, so for any price c the sum of f is that of f - c q, plus c. The same holds for the terms' least and
largest values: each price gives true bounds, and the best of a few counts. f - c q is convex in q. It is least where
q = r p with c = 1/2 log(2r / (1 + r)), or at the end that is nearest to that, and largest at an end.

Axes: T positions, k candidates, C prices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array, Int64Array

ROUNDING_NATS = 2e-6  # largest error of a log-probability down to -16, or of a sum of many, in float32
FLOAT32_SPACING = 2.0**-23  # relative distance between neighbouring float32 numbers
MASS_ROUNDING = 1e-6  # largest error of a sum of probabilities in float32
TINY = 1e-300
OUTWARD = 1e-12  # relative; more than the rounding of a hundred operations in float64
SLACK = 1e-11  # JS and the gap are widened by this, which is more than the rounding of float64
RATIOS = np.exp(np.linspace(-3.0, 3.0, 33))[:, None]  # (C, 1) of q to p, where f - c q is least; 1 is among them
PRICES = 0.5 * np.log(2.0 * RATIOS / (1.0 + RATIOS))  # (C, 1) c
LEAST_PROBABILITY = 1e-290  # float64 loses digits of smaller probabilities, so they count as anything from 0 to this


class Interval(NamedTuple):
    """A quantity at each position is known to lie in [lower, upper]."""

    lower: Float64Array  # (T,)
    upper: Float64Array  # (T,)

    @property
    def middle(self) -> Float64Array:
        return (self.lower + self.upper) / 2.0

    def at(self, rows: Int64Array) -> Interval:
        return Interval(self.lower[rows], self.upper[rows])

    def times(self, other: Interval) -> Interval:
        """Return the product of two quantities that are not negative."""
        return Interval(self.lower * other.lower * (1.0 - OUTWARD), self.upper * other.upper * (1.0 + OUTWARD))

    def widened(self, less: Float64Array, more: Float64Array) -> Interval:
        """Return the interval widened by so much at its ends, of a quantity between 0 and 1."""
        return Interval(np.maximum(self.lower - less, 0.0), np.minimum(self.upper + more, 1.0))

    def shifted(self, nats: Float64Array) -> Interval:
        """Return the interval of a probability whose log-odds are moved by at most `nats` (T,)."""
        factor = np.exp(nats)
        lower = self.lower / (self.lower + (1.0 - self.lower) * factor)
        upper = self.upper / (self.upper + (1.0 - self.upper) / factor)
        return Interval(np.where(nats > 0.0, lower, self.lower), np.where(nats > 0.0, upper, self.upper))

    def complement(self) -> Interval:
        """Return one minus the quantity, a probability. Its rounding is absolute: the difference may be tiny."""
        return Interval(np.maximum(1.0 - self.upper - OUTWARD, 0.0), np.minimum(1.0 - self.lower + OUTWARD, 1.0))


def normalized_entropy(
    lower: npt.ArrayLike, upper: npt.ArrayLike, exact: npt.ArrayLike, noise_nats: npt.ArrayLike, vocab_size: int
) -> Interval:
    """Return the interval of Hbar (T,) in the rows that count, from entropy bounds (T,) in nats of the served rows."""
    factor = np.exp(np.asarray(noise_nats, dtype=np.float64) + ROUNDING_NATS)
    # Rounding may hide this much mass in a sum of float32 probabilities, anywhere in the vocabulary.
    lost = np.where(exact, 0.0, MASS_ROUNDING * np.log(vocab_size / MASS_ROUNDING))
    low = np.asarray(lower, dtype=np.float64) / factor - lost
    high = np.asarray(upper, dtype=np.float64) * factor + lost
    scale = np.log(max(vocab_size, 2))
    return Interval(np.clip(low / scale, 0.0, 1.0), np.clip(high / scale, 0.0, 1.0))


def rounding_nats(logprobs: npt.ArrayLike) -> Float64Array:
    """Return the largest float32 error of log-probabilities, or of the log of a sum. -inf has no error."""
    values = np.asarray(logprobs, dtype=np.float64)
    return np.maximum(ROUNDING_NATS, np.abs(np.where(np.isneginf(values), 0.0, values)) * FLOAT32_SPACING)


def probability_interval(mass: npt.ArrayLike, noise_nats: npt.ArrayLike) -> Interval:
    """Return the interval of a set's probability in the row that counts, from that in the served row (any shape).

    The noise changes this probability, and that of all other tokens together, by a factor of at most e^noise each.
    """
    served = np.clip(np.asarray(mass, dtype=np.float64), 0.0, 1.0)
    rounding = rounding_nats(np.log(np.where(served > 0.0, served, 1.0)))
    factor = np.exp(np.asarray(noise_nats, dtype=np.float64) + rounding)
    lower = np.maximum(served / factor, 1.0 - (1.0 - served + MASS_ROUNDING) * factor) - MASS_ROUNDING * served
    upper = np.minimum(served * factor, 1.0 - (1.0 - served - MASS_ROUNDING) / factor) + MASS_ROUNDING * served
    return Interval(np.clip(lower, 0.0, 1.0), np.clip(upper, 0.0, 1.0))


def gap_bounds(
    shares: tuple[Float64Array, Float64Array],
    student: tuple[Float64Array, Float64Array],
    coverage: Interval,
    lambda_mass: float,
    lambda_shape: float,
) -> tuple[Interval, Interval]:
    """Return intervals (T,) of JS in bits, and of the gap G.

    `shares` (T, k) bound the teacher renormalised on its candidates, `student` (T, k) the student's full-vocabulary
    probabilities of the same candidates, and `coverage` (T,) their sum A.
    """
    p_lower, p_upper = (each[:, None, :] for each in shares)  # (T, 1, k)
    lower = np.where(student[0] < LEAST_PROBABILITY, 0.0, student[0]) / np.maximum(coverage.upper, TINY)[:, None]
    upper = np.maximum(student[1], LEAST_PROBABILITY) / np.maximum(coverage.lower, TINY)[:, None]
    q_lower, q_upper = (np.minimum(each, 1.0)[:, None, :] for each in (lower, upper))
    best = np.where(
        RATIOS > 1.0, RATIOS * p_upper, np.where(RATIOS < 1.0, RATIOS * p_lower, np.maximum(p_lower, q_lower))
    )
    q = np.clip(best, q_lower, q_upper)  # (T, C, k)
    nearest = (_term(np.clip(q, p_lower, p_upper), q) - PRICES * q).sum(axis=-1) + PRICES[:, 0]  # (T, C)
    at_lower, at_upper = (np.maximum(_term(p_lower, each), _term(p_upper, each)) for each in (q_lower, q_upper))
    farthest = np.maximum(at_lower - PRICES * q_lower, at_upper - PRICES * q_upper).sum(axis=-1) + PRICES[:, 0]
    least = np.clip(nearest.max(axis=-1) / np.log(2.0) - SLACK, 0.0, 1.0)
    most = np.clip(farthest.min(axis=-1) / np.log(2.0) + SLACK, 0.0, 1.0)
    most = np.where(coverage.lower <= 0.0, 1.0, most)  # JS counts as 1 for a student without mass on the candidates
    gap_lower = lambda_mass * (1.0 - coverage.upper) + lambda_shape * least - SLACK
    gap_upper = lambda_mass * (1.0 - coverage.lower) + lambda_shape * most + SLACK
    return Interval(least, most), Interval(np.maximum(gap_lower, 0.0), np.minimum(gap_upper, 1.0))


def _term(p: Float64Array, q: Float64Array) -> Float64Array:
    """Return one candidate's part of JS in nats, 0 at 0."""
    total = np.maximum(p + q, TINY)
    return 0.5 * (_times_log(p, 2.0 * p / total) + _times_log(q, 2.0 * q / total))


def _times_log(x: Float64Array, ratio: Float64Array) -> Float64Array:
    return x * np.log(np.where(x > 0.0, np.maximum(ratio, TINY), 1.0))
