"""Widens parts of the acquisition score for statistical noise: that of servers that compute in 16 bits.

Pure numpy in float64. Rounding moves each logit by itself. If the errors e_v of a row's logits are independent, with
mean 0 and tails no heavier than a normal distribution's of standard deviation sd, then for fixed weights g

    P(|sum_v g_v e_v| > z sd ||g||_2) <= 2 exp(-z^2 / 2)

(the Chernoff bound of a sub-Gaussian sum). To first order each part of the score is moved by such a sum, whose weights
are its derivatives by the logits. They add up to 0, so what all logits share has no effect. The worst errors of that
size would move it by sd ||g||_1: in a row of many likely tokens that is far more.

z follows from `ERROR_PROBABILITY` by a union over all positions of a response and over `EVENTS` of each. So a selection
that is called certain is wrong with at most that probability, per response, all of its positions together. Second-order
terms are left out where the first order does not vanish: they are sd^2 beside z sd. The tests compare with whole rows.

Axes: T positions, k candidates.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spot_async.models.precision import NORMAL_QUANTILE, SURE_NATS
from spot_async.types import Float64Array

AnyFloats: TypeAlias = npt.NDArray[np.floating]

ERROR_PROBABILITY = 0.01  # that the selection of one response is called certain, and is not the exact one
# At a position: the entropy, C, A and JS of two rows, and the pairs of tokens at the end of the teacher's best k.
EVENTS = 16


def split(noise_nats: float, positions: int) -> tuple[float, float]:
    """Return a server's noise as (sure, statistical), one of which is 0, for a response of so many positions.

    `noise_nats` is `Capabilities.logprob_noise_nats`. Statistical noise is z sd: it is the reach of one logit's error.
    """
    if noise_nats <= SURE_NATS:
        return noise_nats, 0.0
    z = math.sqrt(2.0 * math.log(2.0 * EVENTS * max(positions, 1) / ERROR_PROBABILITY))
    return 0.0, z * noise_nats / NORMAL_QUANTILE


def of_two(spread_nats: Float64Array) -> Float64Array:
    """Return the reach of the difference of two tokens' errors."""
    return spread_nats * math.sqrt(2.0)


def of_entropy(
    logprobs: AnyFloats, lower: AnyFloats, upper: AnyFloats, spread_nats: float | Float64Array
) -> Float64Array:
    """Return how far an entropy (T,) in nats may be moved, from its row's top-K (T, K) and its bounds (T,).

    dH = -sum_v p_v (log p_v + H) e_v.
    """
    logprobs, lower, upper = (np.asarray(each, dtype=np.float64) for each in (logprobs, lower, upper))

    def squares(values: Float64Array) -> Float64Array:
        """Return p (log p + H)^2, the larger at either bound of H."""
        apart = np.maximum(np.abs(values + lower[:, None]), np.abs(values + upper[:, None]))
        return np.asarray(np.exp(values) * np.minimum(apart, 1e3) ** 2)

    shown = (np.exp(logprobs) * squares(logprobs)).sum(axis=-1)
    # Of tokens that are not served only their mass is known, and the largest probability. The function has another
    # maximum at log p = -H - 2.
    last = logprobs[:, -1:]
    peak = np.where(last[:, 0] > -lower - 2.0, 4.0 * np.exp(-lower - 2.0), 0.0)
    hidden = np.clip(1.0 - np.exp(logprobs).sum(axis=-1), 0.0, 1.0) * np.maximum(squares(last)[:, 0], peak)
    return np.asarray(spread_nats * np.sqrt(shown + hidden))


def of_set(
    inside: tuple[Float64Array, Float64Array], outside: tuple[Float64Array, Float64Array], spread_nats: Float64Array
) -> Float64Array:
    """Return how far the log-odds (T,) of a set of tokens may be moved.

    They move by the mean error inside minus that outside, each weighted by probability. `inside` and `outside` are the
    sums (T,) of the squares of the probabilities, at most, and of the probabilities, at least.
    """
    return np.asarray(spread_nats * np.sqrt(sum(_squared_weights(*each) for each in (inside, outside))))


def _squared_weights(squares: Float64Array, mass: Float64Array) -> Float64Array:
    """Return the sum (T,) of the squares of weights that add up to 1. So it is 1 at most."""
    total = mass**2
    return np.where(total > squares, squares / np.where(total > 0.0, total, 1.0), 1.0)


def of_divergence(
    p: Float64Array,
    q_lower: Float64Array,
    q_upper: Float64Array,
    divergence: Float64Array,
    p_spread_nats: Float64Array,
    q_spread_nats: Float64Array,
) -> Float64Array:
    """Return how far JS (T,) in bits may be moved, from the shares P (T, k), bounds of Q (T, k), and JS at most.

    dJS = 1/2 sum_i P_i (a_i - KL(P || M)) e_i + 1/2 sum_i Q_i (b_i - KL(Q || M)) f_i, where M is the mean of P and Q,
    a = log(P / M) and b = log(Q / M). Both KL are between 0 and 2 JS.
    """
    most = 2.0 * divergence * math.log(2.0)
    a_least, a_most = _log_over_mean(p, q_upper), _log_over_mean(p, q_lower)
    least, largest = _mean((p * a_least).sum(axis=-1), (p * a_most).sum(axis=-1), most)
    of_p = p * np.maximum(a_most - least, largest - a_least)
    b_least, b_most = _log_over_mean(q_lower, p), _log_over_mean(q_upper, p)
    # Below P, the least of Q b is that of the bounds or lies between them, where it is above -P / 4.
    falling = -np.minimum(np.minimum(q_upper, p) * np.maximum(-b_least, 0.0), p / 4.0)
    lowest = np.where(b_least > 0.0, q_lower * b_least, falling)
    highest = np.where(b_most > 0.0, q_upper * b_most, np.maximum(q_lower * b_least, q_upper * b_most))
    least, largest = _mean(lowest.sum(axis=-1), highest.sum(axis=-1), most)
    under = q_upper * largest + np.where(b_least > 0.0, -q_upper * b_least, -falling)
    of_q = np.maximum(q_upper * (b_most - least), under)
    squares = (p_spread_nats[:, None] * of_p) ** 2 + (q_spread_nats[:, None] * np.maximum(of_q, 0.0)) ** 2
    # Where P and Q are nearly alike, the derivatives vanish. Then JS is 1/8 of the variance of log(P / Q), which two
    # likely tokens make largest.
    share = np.minimum(p.max(axis=-1), q_lower.max(axis=-1))
    variance = np.where(share > 0.5, share * (1.0 - share), 0.25) * 2.0 * (p_spread_nats**2 + q_spread_nats**2)
    return np.asarray((np.sqrt(squares.sum(axis=-1)) / 2.0 + variance / 8.0) / math.log(2.0))


def _log_over_mean(x: Float64Array, y: Float64Array) -> Float64Array:
    """Return log(2x / (x + y)), finite at 0."""
    return np.asarray(np.log(np.maximum(2.0 * x / np.maximum(x + y, 1e-300), 1e-300)))


def _mean(lower: Float64Array, upper: Float64Array, most: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return bounds (T, 1) of a mean that is also between 0 and `most`."""
    return np.clip(lower, 0.0, most)[:, None], np.clip(upper, 0.0, most)[:, None]
