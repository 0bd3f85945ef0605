"""Discovers noise and temperature from replies to the same question asked in two ways. Pure: backends do the asking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from spot_async.models import precision
from spot_async.types import FloatArray, Generation, IntArray, LogprobTemperature

LEAST_NOISE_NATS = 1e-6  # float32's rounding of log-probabilities, since rows that were equal once may differ later


def noise_nats(differences: Iterable[FloatArray]) -> float:
    """Return the noise to expect, from differences (nats, any shapes) between replies about the same rows."""
    return max(LEAST_NOISE_NATS, precision.noise_nats(np.concatenate([each.ravel() for each in differences])))


def differences(
    generated: Generation, logprobs: FloatArray, topk_ids: IntArray, topk_logprobs: FloatArray
) -> Iterator[FloatArray]:
    """Yield differences between rows as generated, and as scored later: `logprobs` (T,) and a top-K (T, K)."""
    yield generated.logprobs - logprobs
    if generated.topk_ids is not None and generated.topk_logprobs is not None:
        same = generated.topk_ids == topk_ids
        yield (generated.topk_logprobs - topk_logprobs)[same]


def temperature_convention(at_one: FloatArray, at_half: FloatArray) -> LogprobTemperature:
    """Return "request" if a row's top-K (K,) has doubled differences at temperature 1/2, else "one"."""
    return "one" if np.ptp(at_half) < 1.5 * np.ptp(at_one) else "request"
