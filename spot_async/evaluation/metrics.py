"""Figures of an evaluation from a table of right and wrong answers.

`correct` is always (problems, samples) bool, every problem with the same number of samples. Errors are
over problems, the unit that benchmarks differ in, so each figure also comes per problem. Generating and
judging the answers happens elsewhere.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def avg_at_k_per_problem(correct: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Share of correct samples of each problem, (problems,)."""
    return np.asarray(_table(correct).mean(axis=1))


def avg_at_k(correct: npt.ArrayLike) -> float:
    """Mean accuracy over all problems and their k samples."""
    return float(avg_at_k_per_problem(correct).mean())


def pass_at_k_per_problem(correct: npt.ArrayLike, k: int) -> npt.NDArray[np.float64]:
    """Probability, for each problem, that k of its n samples drawn without replacement hold a correct one.

    `1 - C(n - c, k) / C(n, k)` with c correct samples: the unbiased estimate of pass@k, and for k = n the
    plain "solved at least once". The binomials are exact integers, so no n overflows and nothing cancels.

    Raises `ValueError` unless 1 <= k <= n.
    """
    table = _table(correct)
    n = table.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, and there are {n} samples a problem")
    subsets = math.comb(n, k)
    missed = [math.comb(n - c, k) for c in table.sum(axis=1).tolist()]
    return np.array([(subsets - misses) / subsets for misses in missed])


def pass_at_k(correct: npt.ArrayLike, k: int) -> float:
    """Unbiased pass@k, averaged over problems (see `pass_at_k_per_problem`)."""
    return float(pass_at_k_per_problem(correct, k).mean())


def standard_error(per_problem_values: npt.ArrayLike) -> float:
    """Standard error of the mean over problems (ddof 1); NaN for a single problem, which has no spread."""
    values = np.asarray(per_problem_values, dtype=np.float64)  # (problems,)
    if values.size < 2:
        return math.nan
    return float(values.std(ddof=1) / math.sqrt(values.size))


def _table(correct: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    table = np.asarray(correct, dtype=np.bool_)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"correct must be a (problems, samples) table with at least one of each, not {table.shape}")
    return table
