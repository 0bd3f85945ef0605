"""Computes Avg@n and Pass@k from a table of right and wrong answers. Pure.

`correct` is always (problems, samples) bool. Functions return a value per problem, since standard errors are over
problems: those of a benchmark are a sample of all that it could ask.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from spot_async.types import Float64Array


def avg_at_k_per_problem(correct: npt.ArrayLike) -> Float64Array:
    """Return the share of correct samples of each problem, (problems,)."""
    return np.asarray(_table(correct).mean(axis=1))


def pass_at_k_per_problem(correct: npt.ArrayLike, k: int) -> Float64Array:
    """Return the unbiased pass@k of each problem, (problems,). Raises `ValueError` as `pass_at_k_of_counts`."""
    table = _table(correct)
    return pass_at_k_of_counts(table.sum(axis=1), table.shape[1], k)


def pass_at_k_of_counts(counts: npt.ArrayLike, samples: int, k: int) -> Float64Array:
    """Return the probability that k of a problem's n samples, drawn without replacement, hold a correct one.

    This is the unbiased estimate of pass@k: `1 - C(n - c, k) / C(n, k)` for each count c of correct samples, in an
    array of any shape. For k = 1 it is the share of correct ones, for k = n "solved at least once". The binomials are
    exact integers, so that no n overflows and nothing cancels.

    Raises `ValueError` unless 1 <= k <= n and all counts are from 0 to n.
    """
    present, place = np.unique(np.asarray(counts), return_inverse=True)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, and there are {samples} samples a problem")
    if present.size and not 0 <= present[0] <= present[-1] <= samples:
        raise ValueError(f"counts of correct responses must be from 0 to {samples}")
    subsets = math.comb(samples, k)
    values = np.array([(subsets - math.comb(samples - c, k)) / subsets for c in present.tolist()], np.float64)
    return values[place].reshape(np.shape(counts))


def standard_error(per_problem_values: npt.ArrayLike) -> float:
    """Return the standard error of the mean over problems (ddof 1); NaN for a single problem, which has no spread."""
    values = np.asarray(per_problem_values, dtype=np.float64)  # (problems,)
    if values.size < 2:
        return math.nan
    return float(values.std(ddof=1) / math.sqrt(values.size))


def _table(correct: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    table = np.asarray(correct, dtype=np.bool_)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"correct must be a (problems, samples) table with at least one of each, not {table.shape}")
    return table
