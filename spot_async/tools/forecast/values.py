"""Estimates at single positions, from the probes of each candidate. All but one are unbiased, however few probes. Pure.

The values V(v) are not known, only how many of the n probes of a candidate were correct. A figure that takes these
shares for the values is biased: the noise of the probes looks like a difference between candidates. So each figure here
is one whose expectation, over the probes, is that of the true values. Tests compare them with sums over all possible
outcomes. The best value has no such estimate, so `most_gain` is one that is never too small on average.

Axes: P positions, k candidates. `prior` (P, k) sums to 1 over candidates; `correct` and `judged` (P, k) are counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from spot_async.types import Float64Array, Int64Array

MAX_OUTCOMES = 8192  # with more possible outcomes of training's probes, some are drawn in place of all
DRAWN_OUTCOMES = 2048


def shares(correct: Int64Array, judged: Int64Array) -> Float64Array:
    """Return the share of correct probes (P, k), whose expectation is the value."""
    return np.asarray(correct / judged)


def probe_variance(correct: Int64Array, judged: Int64Array) -> Float64Array:
    """Return estimates (P, k) of V (1 - V), the variance of one probe. Needs 2 probes of each candidate."""
    share = shares(correct, judged)
    return share * (1.0 - share) * judged / (judged - 1)


def value_variance(prior: Float64Array, correct: Int64Array, judged: Int64Array) -> Float64Array:
    """Return estimates (P,) of the variance of the values under the prior. Single ones may be negative.

    With s = correct / judged of n judged probes, `sum p s^2 - (sum p s)^2` is too large, since each s has a noise of
    V (1 - V) / n. That adds `sum p (1 - p) V (1 - V) / n` to the expectation, and is taken off.
    """
    share = shares(correct, judged)
    mean = (prior * share).sum(axis=-1, keepdims=True)
    observed = (prior * (share - mean) ** 2).sum(axis=-1)
    noise = (prior * (1.0 - prior) * probe_variance(correct, judged) / judged).sum(axis=-1)
    return np.asarray(observed - noise)


def kept(correct: Int64Array, judged: Int64Array, probes: int) -> Float64Array:
    """Return estimates (P,) of the chance that B+ keeps the position when each candidate has so many probes.

    Of the subsets of `probes` of a candidate's probes, a share has none correct. Their product is the chance that the
    position is left out. Needs at least `probes` of each candidate.
    """
    left_out = np.ones(len(correct))
    for candidate in range(correct.shape[-1]):
        left_out *= _drawn(correct[:, candidate], judged[:, candidate], probes)[:, 0]
    return 1.0 - left_out


def gain(
    prior: Float64Array, correct: Int64Array, judged: Int64Array, *, gamma: float, probes: int, seed: int = 0
) -> Float64Array:
    """Return estimates (P,) of what the target gains in value over the prior: E[sum_v (target(v) - p(v)) V(v)].

    The target is that of a run: tilted by the outcomes of `probes` probes a candidate. The expectation is over those
    outcomes. Each candidate's probes are split in all ways into so many that tilt and the others, which judge: the two
    are independent, so nothing is counted twice. Needs more than `probes` of each candidate.

    It holds with and without the gate: where no probe is correct, the target is the prior.
    """
    drawn = [
        _drawn(correct[:, candidate], judged[:, candidate], probes) for candidate in range(correct.shape[-1])
    ]  # k of (P, probes + 1)
    gains = np.zeros(len(correct))
    for counts, weight in _outcomes(drawn, probes, seed):
        others = (correct - counts) / (judged - probes)  # (P, k) the value of the probes that judge
        target = tilted(prior, counts / probes, gamma)
        # A split that cannot be has weight 0, and `others` beyond [0, 1].
        gains += weight * ((target - prior) * others).sum(axis=-1)
    return gains


def most_gain(prior: Float64Array, correct: Int64Array, judged: Int64Array) -> Float64Array:
    """Return the largest share less the prior's (P,). Its expectation is at least max V - sum_v p(v) V(v).

    No target gains more at the position, whatever gamma and the number of probes. What it is too large by is the noise
    of the probes, which falls with the square root of their number.
    """
    share = shares(correct, judged)
    return np.asarray(share.max(axis=-1, initial=0.0) - (prior * share).sum(axis=-1))


def tilted(prior: Float64Array, values: Float64Array, gamma: float) -> Float64Array:
    """Return `p(v) exp(gamma V(v)) / Z` (..., k), as the policy computes it (equation 10)."""
    weights = prior * np.exp(gamma * (values - values.max(axis=-1, keepdims=True)))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _drawn(correct: Int64Array, judged: Int64Array, probes: int) -> Float64Array:
    """Return the chances (P, probes + 1) that of `probes` probes, drawn without replacement, 0, 1, ... are correct."""
    chances = np.zeros((len(correct), probes + 1))
    for row, (c, n) in enumerate(zip(correct.tolist(), judged.tolist(), strict=True)):
        for j in range(max(0, probes - (n - c)), min(probes, c) + 1):
            chances[row, j] = math.comb(c, j) * math.comb(n - c, probes - j) / math.comb(n, probes)
    return chances


def _outcomes(drawn: list[Float64Array], probes: int, seed: int) -> Iterator[tuple[Int64Array, Float64Array]]:
    """Yield counts of correct probes (k,) or (P, k), and their weights (P,): all there are, or many drawn at random."""
    if (probes + 1) ** len(drawn) <= MAX_OUTCOMES:
        for counts in itertools.product(range(probes + 1), repeat=len(drawn)):
            weight = np.prod([chances[:, j] for chances, j in zip(drawn, counts, strict=True)], axis=0)
            yield np.array(counts, dtype=np.int64), weight
        return
    random = np.random.default_rng(seed)
    below = [chances.cumsum(axis=-1) for chances in drawn]
    weight = np.full(len(drawn[0]), 1.0 / DRAWN_OUTCOMES)
    for _ in range(DRAWN_OUTCOMES):
        picks = [(random.random((len(each), 1)) >= each[:, :-1]).sum(axis=-1) for each in below]
        yield np.stack(picks, axis=-1).astype(np.int64), weight
