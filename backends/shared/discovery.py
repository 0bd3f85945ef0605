"""What a server's numbers say of it when the same rows are asked for in two ways. Pure: adapters do the asking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from spot_async.checks.discovery import NOISE_MARGIN
from spot_async.types import FloatArray, Generation, IntArray, LogprobTemperature

LEAST_NOISE_NATS = 1e-6  # float32's rounding of log-probabilities: rows that were equal once need not be again


def noise_nats(differences: Iterable[FloatArray]) -> float:
    """The noise to reckon with, from differences (nats, any shapes) between readings of the same rows."""
    largest = max((float(np.abs(each).max(initial=0.0)) for each in differences), default=0.0)
    return max(LEAST_NOISE_NATS, NOISE_MARGIN * largest)


def differences(
    generated: Generation, logprobs: FloatArray, topk_ids: IntArray, topk_logprobs: FloatArray
) -> Iterator[FloatArray]:
    """Between rows as they were generated, and as they are read again with `logprobs` (T,) and a top-K (T, K)."""
    yield generated.logprobs - logprobs
    if generated.topk_ids is not None and generated.topk_logprobs is not None:
        same = generated.topk_ids == topk_ids
        yield (generated.topk_logprobs - topk_logprobs)[same]


def temperature_convention(at_one: FloatArray, at_half: FloatArray) -> LogprobTemperature:
    """Whether the top-K (K,) of a row has its differences doubled when it is asked for at temperature 1/2."""
    return "one" if np.ptp(at_half) < 1.5 * np.ptp(at_one) else "request"
