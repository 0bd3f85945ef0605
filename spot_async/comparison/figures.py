"""Per-problem figures from counts of correct responses. Whole tables of right and wrong: `evaluation/metrics.py`."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def pass_at_k_values(correct: npt.ArrayLike, samples: int, k: int) -> npt.NDArray[np.float64]:
    """`1 - C(n - c, k) / C(n, k)` for each count c of `correct`, of any shape: the unbiased Pass@k of a problem.

    With k = 1 it is the share of correct responses (Avg@n), with k = n "solved at least once". Raises `ValueError`
    unless 1 <= k <= samples and all counts are from 0 to `samples`.
    """
    counts = np.asarray(correct)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, and there are {samples} samples a problem")
    if counts.size and not 0 <= counts.min() <= counts.max() <= samples:
        raise ValueError(f"counts of correct responses must be from 0 to {samples}")
    subsets = math.comb(samples, k)
    by_count = np.array([1.0 - math.comb(samples - c, k) / subsets for c in range(samples + 1)])
    return np.asarray(by_count[counts])
