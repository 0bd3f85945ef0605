"""How far apart two computations of one log-probability may be, by the type of the numbers. Pure.

The limits lie between what rounding does and what another distribution does. In float32, servers and trainer agree
within 1e-4 nats (CUDA's TF32 products: 1e-2). In 16 bits the logits themselves are rounded, by up to 0.125 nats between
16 and 32, and 1e-2 is usual on average. Single tokens, above all unlikely ones, may be more than 0.5 nats off. So in 16
bits a share of the tokens is judged and not the largest difference. Another distribution moves most of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spot_async.types import FloatArray

OTHER_MEAN_NATS = 0.1  # rounding does not move tokens so far on average
OTHER_SCALE = 1.1  # nor does it spread log-probabilities by such a factor, as temperatures do
LEAST_SPREAD_NATS = 0.5  # log-probabilities that are less spread show no factor

SURE_NATS = 1e-3  # noise up to this is that of float32, and counts as a bound: intervals hardly grow by it
QUANTILE, CONFIDENCE = 0.999, 0.95
NORMAL_QUANTILE = 3.2905  # so many standard deviations hold `QUANTILE` of a normal distribution
NOISE_MARGIN = 2.0  # times the largest of a few differences, since few requests see less noise than a long run


@dataclass(frozen=True)
class Precision:
    """The precision of a computation, and how far its log-probabilities may be from those of another."""

    words: str  # for people
    largest_nats: float  # of `share` of a few hundred tokens
    mean_nats: float
    share: float

    def judged_nats(self, differences: FloatArray) -> float:
        """Return what is held against `largest_nats`: the difference that `share` of them, if any, do not exceed."""
        return float(np.quantile(np.abs(differences), self.share, method="lower")) if differences.size else 0.0

    def fault(self, one: FloatArray, other: FloatArray, *, noise_nats: float = 0.0) -> str | None:
        """Say how log-probabilities (N,) differ from others of the same tokens, if not by rounding, or None.

        `noise_nats` is what readings of one row differ by, but for a few. It raises the limits. The mean of such noise
        is below its standard deviation.
        """
        differences = np.abs(one - other).astype(np.float64)
        limit = max(self.largest_nats, noise_nats)
        if (judged := self.judged_nats(differences)) > limit:
            return f"by {judged:.2g} nats, where rounding in {self.words} makes {limit:.2g} at most"
        limit = max(OTHER_MEAN_NATS, noise_nats / NORMAL_QUANTILE)
        if differences.size and (nats := float(differences.mean())) > limit:
            return f"by {nats:.2g} nats on average, where rounding in {self.words} makes {limit:.2g} at most"
        spreads = [float(np.std(each[differences <= judged])) if each.size else 0.0 for each in (one, other)]
        if min(spreads) > max(LEAST_SPREAD_NATS, noise_nats) and max(spreads) > OTHER_SCALE * min(spreads):
            return f"by a factor of {spreads[1] / spreads[0]:.2g}, as at another temperature"
        return None


FLOAT32 = Precision("float32", largest_nats=0.05, mean_nats=0.01, share=1.0)
BITS16 = Precision("16 bits", largest_nats=0.5, mean_nats=0.1, share=0.95)


def precision(*dtypes: str | None) -> Precision:
    """Return the precision of a comparison between computations of these types.

    A type that is not stated is taken for one of 16 bits, since its limits hold for both.
    """
    return FLOAT32 if all(dtype in ("float32", "float") for dtype in dtypes) else BITS16


def noise_nats(differences: FloatArray) -> float:
    """Return the noise to expect, from differences (N,) in nats between computations of the same log-probabilities.

    `QUANTILE` of all log-probabilities differ by less, with a confidence of `CONFIDENCE`: it is an order statistic of
    those seen. Nor is it less than the quantile of a normal distribution with their standard deviation, so that
    NORMAL_QUANTILE-th parts of it are a standard deviation in the middle of the distribution as well as in its tails.

    Fewer than 2,995 differences cannot tell such a quantile (0.999^2995 = 5 %): then it is twice the largest. So it is
    where that is no more than `SURE_NATS`.
    """
    values = np.sort(np.abs(np.asarray(differences, dtype=np.float64)).ravel())
    if not values.size:
        return 0.0
    largest = NOISE_MARGIN * float(values[-1])
    above = _allowed_above(values.size)
    if above is None or largest <= SURE_NATS:
        return largest
    return max(float(values[-1 - above]), NORMAL_QUANTILE * math.sqrt(float(np.mean(values**2))))


def logit_errors(differences: FloatArray) -> FloatArray:
    """Return the errors (M,) of logits, from differences (N, K) of the log-probabilities of tokens in N rows.

    What all tokens of a row share is the error of its softmax's denominator. It is taken off, and it is no noise of the
    selection. NaN is unknown, and a row with fewer than two known tokens tells nothing.
    """
    known = ~np.isnan(differences)
    count = known.sum(axis=1)
    rows = differences[count > 1].astype(np.float64)
    count = count[count > 1][:, None]
    errors = (rows - np.nansum(rows, axis=1, keepdims=True) / count) * np.sqrt(count / (count - 1.0))
    return np.asarray(errors[~np.isnan(errors)])


def _allowed_above(count: int) -> int | None:
    """Return how many of `count` values may be above one that is the quantile or more; None if there are too few.

    So many are above the quantile with a chance of 1 - `CONFIDENCE` at most (binomial).
    """
    chance = total = QUANTILE**count
    above = None
    while total <= 1.0 - CONFIDENCE:
        above = 0 if above is None else above + 1
        chance *= (count - above) / (above + 1) * (1.0 - QUANTILE) / QUANTILE
        total += chance
    return above
