"""Finds and pairs what evaluations wrote: which problems, and how often each method solved each.

Everything that would make a difference between two methods meaningless is refused here, in one line. No statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spot_async.config_evaluation import RESERVED_NAMES
from spot_async.errors import DataError
from spot_async.evaluation.figures import BenchmarkFigures, EvaluationFigures, read_figures

AFTER_TRAINING = "evaluation-after.json"
FIGURES_FILES = ("evaluation.json", AFTER_TRAINING)  # of `eval` and of `train`


@dataclass(frozen=True)
class Evaluated:
    """One row of the table."""

    name: str
    path: Path  # of the file
    figures: EvaluationFigures


@dataclass(frozen=True)
class PairedBenchmark:
    """Counts of correct responses of the same problems by every method."""

    name: str
    samples: int
    correct: npt.NDArray[np.int64]  # (problems, methods)


def read_evaluated(argument: str) -> Evaluated:
    """`RUN` or `NAME=RUN`, where RUN is a run directory or one of its figures files. Raises DataError."""
    name, separator, where = argument.partition("=")
    path = Path(where if separator else argument)
    if path.is_dir():
        found = [path / name for name in FIGURES_FILES if (path / name).is_file()]
        if not found:
            raise DataError(
                f"{path}: no {' or '.join(FIGURES_FILES)} in it: give a directory of `eval` or `train` whose "
                "evaluation is complete"
            )
        file = found[0]
    else:
        file = path
    figures = read_figures(file)
    for benchmark, each in figures.benchmarks.items():
        if problem := impossible(benchmark, each):
            raise DataError(f"{file}: {benchmark}: {problem}: the file is damaged or was edited; evaluate again")
    return Evaluated(name if separator else str(path), file, figures)


def impossible(name: str, figures: BenchmarkFigures) -> str | None:
    """What no evaluation writes, so that a table of it would mislead."""
    if name in RESERVED_NAMES:
        return "is what results call their own rows"
    if figures.samples < 1:
        return f"{figures.samples} responses a problem"
    if figures.correct and len(figures.correct) != figures.problems:
        return f"{figures.problems} problems, but counts of {len(figures.correct)}"
    for problem, count in figures.correct.items():
        if not 0 <= count <= figures.samples:
            return f"{count} of {figures.samples} responses to problem {problem!r} are correct"
    if figures.verdicts and sum(figures.verdicts.values()) != figures.problems * figures.samples:
        return f"{sum(figures.verdicts.values())} verdicts of {figures.problems} x {figures.samples} responses"
    return None


def paired(runs: Sequence[Evaluated], names: Sequence[str] = ()) -> list[PairedBenchmark]:
    """The benchmarks `names`, by default all that count for the first run's mean.

    Raises DataError unless all runs have them with the same problems and as many responses to each, and unless runs
    have different names.
    """
    twice = sorted({run.name for run in runs if [each.name for each in runs].count(run.name) > 1})
    if twice:
        raise DataError(f"{twice[0]} is given twice: name one of them otherwise, NAME=RUN")
    wanted = list(dict.fromkeys(names)) or macro_names(runs[0])
    benchmarks = [_paired(name, [(run.name, _benchmark(run, name)) for run in runs]) for name in wanted]
    uneven = next((each for each in benchmarks if each.samples != benchmarks[0].samples), None)
    if uneven is not None:
        raise DataError(
            f"{benchmarks[0].name} has {benchmarks[0].samples} responses a problem and {uneven.name} {uneven.samples}: "
            "one table has one number of responses; choose with --benchmark"
        )
    return benchmarks


def macro_names(run: Evaluated) -> list[str]:
    if run.figures.macro is None or not run.figures.macro.benchmarks:
        raise DataError(f"{run.name}: nothing in {run.path} was judged, so there is nothing to compare")
    return run.figures.macro.benchmarks


def different_settings(runs: Sequence[Evaluated]) -> str | None:
    """The first setting in which a run was evaluated otherwise than the first, as a line for people."""
    first, *others = runs
    for other in others:
        ours, theirs = first.figures.settings, other.figures.settings
        for key in dict.fromkeys([*ours, *theirs]):
            if key in ours and key in theirs and ours[key] != theirs[key]:
                return (
                    f"evaluated differently: {key} is {ours[key]} for {first.name} and {theirs[key]} for {other.name}"
                )
    return None


def _benchmark(run: Evaluated, name: str) -> BenchmarkFigures:
    found = run.figures.benchmarks.get(name)
    if found is None:
        raise DataError(
            f"{run.name} has no benchmark {name}, only {', '.join(run.figures.benchmarks)}: choose with "
            "--benchmark what all have"
        )
    if not found.correct:
        raise DataError(f"{run.name}: {name} was not judged, so it cannot be compared")
    return found


def _paired(name: str, found: Sequence[tuple[str, BenchmarkFigures]]) -> PairedBenchmark:
    (first_run, first), *others = found
    ids = list(first.correct)
    for run, other in others:
        if different := ids_apart(ids, list(other.correct)):
            raise DataError(
                f"{name}: {first_run} and {run} were not asked the same problems ({len(ids)} and {len(other.correct)}, "
                f"{different[0]!r} in one of them only), so they cannot be paired: evaluate both on the same files"
            )
        if other.samples != first.samples:
            raise DataError(
                f"{name}: {first_run} has {first.samples} responses a problem and {run} {other.samples}: evaluate both "
                "with the same evaluation.samples"
            )
    table = [[each.correct[problem] for _, each in found] for problem in ids]
    return PairedBenchmark(name, first.samples, np.array(table, dtype=np.int64).reshape(len(ids), len(found)))


def ids_apart(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Those that only one of both has."""
    return sorted(set(ours) ^ set(theirs))
