"""Figures with standard errors and intervals, from sums over prompts. Pure.

Prompts are independent of each other, and positions of a prompt are not. So a figure is a function of sums over
prompts, and its error is found by leaving out one prompt after the other (the jackknife). That needs no model of what
varies inside a prompt, and holds for ratios and products of sums as well. Of 200 forecasts of 50 prompts each, redrawn
from 600 prompts of the quickstart whose figures count as the truth, the 95 % intervals held it in 94 to 98.5 %. Where
70 % of simulated prompts add nothing, symmetric intervals held it in 88 %, and those here in 96 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import msgspec
import numpy as np

from spot_async.types import Float64Array

CONFIDENCE = 0.95
NO_SKEW = 1e-6  # below this the correction is smaller than its rounding
WEIGHTINGS = 4000  # so many that the limit below is right to about a twentieth of its distance from the mean

Sums = Mapping[str, Float64Array]  # by name, sums over the prompts that are counted: one each, or one per omission


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, its standard error over prompts, and the ends of its 95 % interval."""

    value: float
    standard_error: float
    low: float
    high: float


def estimate(
    per_prompt: Sums, figure: Callable[[Sums], Float64Array], *, least: float = -math.inf, most: float = math.inf
) -> Estimate | None:
    """Return what `figure` makes of the sums over all prompts, and its error. It lies between `least` and `most`.

    `per_prompt` holds what each prompt adds to each sum, (n,). `figure` works on arrays of any shape. Return None where
    it or its error is unknown: with one prompt, or where a single prompt has all that is divided by.
    """
    totals = {name: np.asarray(added, dtype=np.float64).sum() for name, added in per_prompt.items()}
    n = max((len(added) for added in per_prompt.values()), default=0)
    if n < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(totals))
        without = figure({name: totals[name] - added for name, added in per_prompt.items()})
    if not (math.isfinite(value) and np.isfinite(without).all()):
        return None
    parts = value + (n - 1) * (value - np.broadcast_to(without, (n,)))  # pseudo-values, whose mean is about `value`
    error = float(parts.std(ddof=1)) / math.sqrt(n)
    low, high = interval(parts, value, error)
    return Estimate(value=value, standard_error=error, low=max(low, least), high=min(high, most))


def interval(parts: Float64Array, value: float, error: float) -> tuple[float, float]:
    """Return the ends of the interval, longer on the side to which the prompts' parts are skewed.

    Most prompts may add nothing and a few add much. Then a symmetric interval is too short above. Hall's transformation
    (Journal of the Royal Statistical Society B 54, 1992) corrects Student's t for the skewness.
    """
    n, spread = len(parts), float(parts.std())
    quantile = t_quantile(n - 1)
    skew = 0.0 if spread == 0 else float((((parts - parts.mean()) / spread) ** 3).mean()) / math.sqrt(n)
    if abs(skew) < NO_SKEW:
        return value - quantile * error, value + quantile * error
    low, high = (3 / skew * (math.cbrt(1 + skew * (t - skew / 6)) - 1) for t in (quantile, -quantile))
    return value - low * error, value - high * error


def limit(gains: Float64Array, positions: Float64Array, *, confidence: float = CONFIDENCE) -> float | None:
    """Return what the mean gain of a position stays below, with this confidence; None without positions.

    `gains` and `positions` (n,) are each prompt's sums; the gain of a position is between 0 and 1. It needs no normal
    distribution, so it holds for few prompts, and where only one prompt in many gains: without any gain seen it is the
    rule of three. The means of randomly weighted prompts and one more that gains all there is (Gaffke, Mathematical
    Methods of Statistics 14, 2005) lie above the true mean with this confidence at their quantile.
    """
    if not positions.sum():
        return None
    weights = np.random.default_rng(0).exponential(size=(WEIGHTINGS, len(gains) + 1))
    most = positions.max()
    means = (weights @ np.append(gains, most)) / (weights @ np.append(positions, most))
    return float(np.quantile(means, confidence))


def ratio(numerator: str, denominator: str) -> Callable[[Sums], Float64Array]:
    """Return the figure that divides one sum by another."""
    return lambda sums: np.asarray(sums[numerator] / sums[denominator])


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's t, from the normal one (Fisher and Cornish; from 4 on to 1 %)."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
