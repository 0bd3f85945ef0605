"""How far apart two computations may be, and what noise is expected from the differences that were seen."""

from __future__ import annotations

import numpy as np
import pytest

from spot_async.models.precision import (
    BITS16,
    CONFIDENCE,
    FLOAT32,
    NOISE_MARGIN,
    QUANTILE,
    SURE_NATS,
    logit_errors,
    noise_nats,
)

QUANTILES = {  # of the absolute value, at 99.9 %
    "normal": (lambda draw, n: draw.normal(size=n), 3.2905),
    "uniform": (lambda draw, n: draw.uniform(-1.0, 1.0, n), 0.999),
    "laplace": (lambda draw, n: draw.laplace(size=n), 6.9078),
    "mostly none": (lambda draw, n: draw.normal(size=n) * (draw.random(n) < 0.01), 1.6449),
}


@pytest.mark.parametrize("name", QUANTILES)
@pytest.mark.parametrize("count", [2995, 4800, 20_000])
def test_the_noise_is_at_least_the_quantile_as_often_as_is_said(count, name):
    make, quantile = QUANTILES[name]
    draw = np.random.default_rng(count)
    found = np.array([noise_nats(make(draw, count)) for _ in range(400)])
    assert (found >= quantile).mean() > CONFIDENCE - 0.03  # 400 trials tell 95 % within 3
    assert np.median(found) < 2.2 * quantile


@pytest.mark.parametrize("name", QUANTILES)
def test_a_standard_deviation_of_the_noise_is_no_smaller_than_that_of_the_differences(name):
    values = QUANTILES[name][0](np.random.default_rng(0), 5000)
    assert noise_nats(values) / 3.2905 >= 0.999 * values.std()


def test_too_few_differences_and_those_of_float32_count_by_the_largest():
    draw = np.random.default_rng(0)
    few, many = draw.normal(size=2994), draw.normal(size=100_000)
    assert noise_nats(few) == NOISE_MARGIN * np.abs(few).max()
    assert noise_nats(many) < np.abs(many).max()
    small = many / np.abs(many).max() * SURE_NATS / NOISE_MARGIN
    assert noise_nats(small) == pytest.approx(SURE_NATS)
    assert noise_nats(np.zeros(0)) == 0.0
    assert QUANTILE**2995 < 1.0 - CONFIDENCE < QUANTILE**2994


@pytest.mark.parametrize("peak", [0.0, 10.0])
def test_the_errors_of_logits_are_found_in_sure_rows_as_in_broad_ones(peak):
    """In a sure row the likeliest token's error is in the denominator, and so in all other log-probabilities."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(2000, 50))
    logits[:, 0] += peak
    errors = 0.05 * draw.normal(size=logits.shape)
    one, two = (each - np.logaddexp.reduce(each, axis=1, keepdims=True) for each in (logits, logits + errors))
    differences = (two - one)[:, :16]
    differences[::3, 5] = np.nan
    assert logit_errors(differences).std() == pytest.approx(0.05, rel=0.02)
    assert logit_errors(np.full((3, 4), np.nan)).size == 0


def tokens(count=72, seed=0):
    """Log-probabilities of sampled tokens: most are nearly sure."""
    draw = np.random.default_rng(seed)
    return -draw.exponential(np.where(draw.random(count) < 0.6, 0.05, 1.5))


@pytest.mark.parametrize("seed", range(20))
def test_the_rounding_of_16_bits_is_no_fault_but_another_distribution_is(seed):
    own, draw = tokens(seed=seed), np.random.default_rng(100 + seed)
    noise = draw.normal(0.0, 0.06, own.shape)
    noise[own.argmin()] = -0.56  # on one rare token
    assert BITS16.fault(own, own + noise) is None
    assert BITS16.fault(own, own / 0.7 + noise) is not None  # at another temperature
    assert BITS16.fault(own, tokens(seed=1000 + seed) + noise) is not None  # another model, or other rows
    assert BITS16.fault(own, np.roll(own, 1) + noise) is not None  # one row off
    assert BITS16.fault(own, own - 0.25) is not None  # a penalty


def test_in_float32_no_token_may_be_further_off_than_before():
    own, other = tokens(), tokens()
    other[7] += 0.06
    assert FLOAT32.fault(own, own + 0.049) is None
    assert FLOAT32.fault(own, other) == "by 0.06 nats, where rounding in float32 makes 0.05 at most"
    assert FLOAT32.fault(own, other, noise_nats=0.1) is None  # what readings of one row differ by
    assert FLOAT32.fault(own[:0], own[:0]) is None
