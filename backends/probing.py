"""What a server's numbers say of it when the same rows are asked for in two ways. Pure: adapters do the asking."""

from __future__ import annotations

import numpy as np

from spot_async.types import FloatArray, Generation, IntArray, LogprobTemperature

NOISE_MARGIN = 2.0  # a short probe sees less of it than a long run


def noise_nats(generated: Generation, logprobs: FloatArray, topk_ids: IntArray, topk_logprobs: FloatArray) -> float:
    """How far rows lie apart when they are generated, and when they are read again with `logprobs` (T,) and a top-K."""
    differences = [np.abs(generated.logprobs - logprobs)]
    if generated.topk_ids is not None and generated.topk_logprobs is not None:
        same = generated.topk_ids == topk_ids
        differences.append(np.abs(generated.topk_logprobs - topk_logprobs)[same])
    return NOISE_MARGIN * float(np.concatenate(differences).max())


def temperature_convention(at_one: FloatArray, at_half: FloatArray) -> LogprobTemperature:
    """Whether the top-K (K,) of a row has its differences doubled when it is asked for at temperature 1/2."""
    return "one" if np.ptp(at_half) < 1.5 * np.ptp(at_one) else "request"
