"""Computes Avg@n and Pass@k from a table of right and wrong answers.

`correct` is always (problems, samples) bool. Functions return a value per problem, since standard errors are over
problems: those of a benchmark are a sample of all that it could ask.

Below are the figures of an evaluation, and their file `evaluation.json`, which `compare` reads. A benchmark's figures
are those of its problems; `macro` is the unweighted mean over benchmarks. Correct responses are counted per problem, so
that two evaluations can be compared problem by problem, and resampled, without the responses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.base.files import read_json
from spot_async.config.evaluation import ALL_TIERS, MACRO
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


LENGTH_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
FIGURES_FORMAT = 1  # raised when the file can no longer be read as before


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean and its standard error over problems; the error is None for a single problem, which has no spread."""

    value: float
    standard_error: float | None

    @classmethod
    def over_problems(cls, values: npt.ArrayLike) -> Estimate:
        """Return the mean of `values` (problems,) with its standard error."""
        return cls(
            value=float(np.mean(np.asarray(values, dtype=np.float64))), standard_error=finite(standard_error(values))
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a set of problems that all have the same number of samples."""

    problems: int
    samples: int  # responses per problem: the n of Avg@n, and the largest k of Pass@k
    tokens: int  # in all responses together
    mean_tokens: Estimate  # per response
    truncated: float  # share of the responses that were cut off at the longest length, in [0, 1]
    verdicts: dict[str, int]  # responses by verdict, with every verdict; empty where nothing is judged
    avg: Estimate | None = None  # Avg@n; None where nothing is judged
    pass_at: dict[int, Estimate] = {}  # Pass@k by k, unbiased
    math_verify: Estimate | None = None  # Avg@n by Math-Verify's own verdicts; None where these are the same
    maj: Estimate | None = None  # maj@n: accuracy of the answer that most samples give; None where there are no votes
    lengths: dict[str, list[float]] = {}  # response tokens at LENGTH_QUANTILES: of all, and by verdict


class BenchmarkFigures(Figures, frozen=True, kw_only=True):
    """The figures of one benchmark."""

    note: str | None = None  # what people must know who compare the figures
    tiers: dict[str, Figures] = {}  # figures of each tier that its problems name
    correct: dict[str, int] = {}  # correct responses of each problem (of `samples`), by its id


class MacroFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Unweighted means over benchmarks. These are independent, so their errors add in squares."""

    benchmarks: list[str]
    avg: Estimate
    pass_at: dict[int, Estimate]  # Pass@k for every k that all benchmarks have


class EvaluationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `evaluation.json`."""

    format: int = FIGURES_FORMAT
    model: str  # directory that was evaluated
    model_fingerprint: str  # equal for equal weights
    dtype: str | None = None  # of its weights, as its config.json says; a server may compute in another
    date: str | None = None  # when the file was written, in UTC
    seconds: float | None = None  # what it took since it was begun or last continued
    settings: dict[str, Any]  # everything else that decides responses and verdicts, by configuration key
    settings_fingerprint: str  # equal for equal settings, and then the figures may be compared
    versions: dict[str, str] = {}  # of the software that verdicts and responses depend on
    benchmarks: dict[str, BenchmarkFigures]  # by name; the set in `evaluation.problems` is called `problems`
    macro: MacroFigures | None  # None where no benchmark is judged
    tokens: int  # of all benchmarks together, like the next two
    truncated: float
    verdicts: dict[str, int]

    @property
    def rows(self) -> Mapping[str, Figures]:
        return figure_rows(self.benchmarks, self.macro)


def figure_rows(benchmarks: Mapping[str, BenchmarkFigures], macro: MacroFigures | None) -> Mapping[str, Figures]:
    """Return figures by the rows of a table: the tiers of a single benchmark, or several benchmarks; last, over all.

    The last is missing where several benchmarks are not judged.
    """
    if len(benchmarks) == 1:
        (whole,) = benchmarks.values()
        return {**whole.tiers, ALL_TIERS: whole}
    if macro is None:
        return benchmarks
    members = [benchmarks[name] for name in macro.benchmarks]
    responses = [each.problems * each.samples for each in members]
    over_all = Figures(
        problems=sum(each.problems for each in members),
        samples=min(each.samples for each in members),
        tokens=sum(each.tokens for each in members),
        mean_tokens=mean_of_independent([each.mean_tokens for each in members]),
        truncated=float(np.average([each.truncated for each in members], weights=responses)),
        verdicts=dict(sum((Counter(each.verdicts) for each in members), Counter())),
        avg=macro.avg,
        pass_at=macro.pass_at,
    )
    return {**benchmarks, MACRO: over_all}


def over_all(rows: Mapping[str, Figures]) -> Figures | None:
    """Return the row of everything; None where nothing is judged."""
    found = rows.get(ALL_TIERS, rows.get(MACRO))
    return None if found is None or found.avg is None else found


def mean_of_independent(estimates: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean of independent estimates. It has no error if one of them has none."""
    errors = [each.standard_error for each in estimates]
    known = [error for error in errors if error is not None]
    return Estimate(
        value=sum(each.value for each in estimates) / len(estimates),
        standard_error=math.hypot(*known) / len(estimates) if len(known) == len(errors) else None,
    )


def read_figures(path: Path) -> EvaluationFigures:
    """Return the contents of `evaluation.json`. Raises DataError if it is missing, damaged, or of a newer program."""
    return read_json(path, EvaluationFigures, newest_format=FIGURES_FORMAT, otherwise="is no evaluation.json")


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
