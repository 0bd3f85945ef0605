"""Reads the figures of evaluations and pairs them by problem: how often did each method solve each? No statistics.

It refuses, in one line, everything that would make a difference between two methods meaningless.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spot_async.config.evaluation import RESERVED_NAMES
from spot_async.errors import DataError
from spot_async.evaluation.metrics import BenchmarkFigures, EvaluationFigures, read_figures
from spot_async.run_directory.reading import RunFiles
from spot_async.types import Int64Array

AFTER_TRAINING = "evaluation-after.json"
FIGURES_FILES = ("evaluation.json", AFTER_TRAINING)  # what `eval` and `train` write
PRESET = "evaluation.preset"
LIMITS = ("memory_limit_bytes", "max_reply_bytes")  # of verifiers, in evaluations of before
BENCHMARKS = "evaluation.benchmarks."


@dataclass(frozen=True)
class Evaluated:
    """One row of the table: an evaluation under its name."""

    name: str
    path: Path  # the figures file
    figures: EvaluationFigures
    trained: RunFiles | None  # the training run that they lie in; None for an evaluation's, and for files of a copy


@dataclass(frozen=True)
class PairedBenchmark:
    """How many responses to each problem of a benchmark were correct, by every method."""

    name: str
    samples: int
    correct: Int64Array  # (problems, methods)


def read_evaluated(argument: str) -> Evaluated:
    """Read `RUN` or `NAME=RUN`, where RUN is a run directory or one of its figures files. Raises DataError.

    What exists under the whole argument is a RUN, so that its path may have an equals sign.
    """
    name, separator, where = ("", "", argument) if Path(argument).exists() else argument.partition("=")
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
    run = RunFiles(file.parent) if (file.parent / "run.json").exists() else None  # refuses one of a newer program
    figures = read_figures(file)
    for benchmark, each in figures.benchmarks.items():
        if problem := impossible(benchmark, each):
            raise DataError(f"{file}: {benchmark}: {problem}: the file is damaged or was edited; evaluate again")
    trained = None if run is None or run.is_evaluation else run
    return Evaluated(name if separator else str(path), file, figures, trained)


def impossible(name: str, figures: BenchmarkFigures) -> str | None:
    """Return what is wrong with figures that no evaluation could have written; None if nothing is."""
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
    """Return the benchmarks `names`, paired; by default all that count for the first run's mean.

    Raises DataError unless all runs have them, with the same problems and equally many responses to each, and unless
    all runs have different names.
    """
    twice = sorted({run.name for run in runs if [each.name for each in runs].count(run.name) > 1})
    if twice:
        raise DataError(f"{twice[0]} is given twice: name one of them otherwise, NAME=RUN")
    wanted = list(dict.fromkeys(names))
    macro = runs[0].figures.macro
    if not wanted:
        if macro is None or not macro.benchmarks:
            raise DataError(f"{runs[0].name}: nothing in {runs[0].path} was judged, so there is nothing to compare")
        wanted = macro.benchmarks
    benchmarks = [_paired(name, [(run.name, _benchmark(run, name)) for run in runs]) for name in wanted]
    uneven = next((each for each in benchmarks if each.samples != benchmarks[0].samples), None)
    if uneven is not None:
        raise DataError(
            f"{benchmarks[0].name} has {benchmarks[0].samples} responses a problem and {uneven.name} {uneven.samples}: "
            "one table has one number of responses; choose with --benchmark"
        )
    return benchmarks


def different_settings(runs: Sequence[Evaluated], names: Sequence[str]) -> list[str]:
    """Return in words every setting that differs between runs and decides figures of the benchmarks `names`."""
    decide = [_that_decide(run.figures.settings, names) for run in runs]
    values = {key: [_words(settings.get(key)) for settings in decide] for settings in decide for key in settings}
    different = [key for key, each in values.items() if len(set(each)) > 1]
    alike: dict[str, list[str]] = {}  # keys by how they differ: those that differ in the same way share a line
    for key in different:
        kind = f"{key.rpartition('.')[0]}.kind"
        if kind in different and key != kind:  # different verifiers have different settings anyway
            continue
        if key.endswith(".prompts"):  # its values are fingerprints, which say nothing to people
            said = "(or answers) are not the same for all"
        else:
            having: dict[str, list[str]] = {}
            for run, value in zip(runs, values[key], strict=True):
                having.setdefault(value, []).append(run.name)
            said = "is " + " and ".join(f"{value} for {', '.join(those)}" for value, those in having.items())
        alike.setdefault(said, []).append(key)
    return [f"{', '.join(keys)} {said}" for said, keys in alike.items()]


def different_versions(runs: Sequence[Evaluated]) -> list[str]:
    """Return the software whose versions differ, with these; files of older programs, which name none, do not count."""
    told = [run.figures.versions for run in runs if run.figures.versions]
    found = {name: {versions.get(name, "none") for versions in told} for name in dict.fromkeys(itertools.chain(*told))}
    return [f"{name} {' and '.join(sorted(of_it))}" for name, of_it in found.items() if len(of_it) > 1]


def same_measurements(runs: Sequence[Evaluated], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of runs that evaluated the same weights with the same settings."""
    return [
        (one.name, other.name)
        for one, other in itertools.combinations(runs, 2)
        if one.figures.model_fingerprint == other.figures.model_fingerprint
        and not different_settings([one, other], names)
    ]


def judged_by(runs: Sequence[Evaluated], names: Sequence[str]) -> str | None:
    """Return the verifiers of the benchmarks `names` in words; None if runs differ in them, since a warning says so."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        found = {_kind(run.figures.settings, name) for run in runs}
        if len(found) > 1 or None in found:
            return None
        kinds.setdefault(str(*found), []).append(name)
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} ({', '.join(those)})" for kind, those in kinds.items())


def _kind(settings: Mapping[str, Any], name: str) -> str | None:
    verifier = settings.get(f"{BENCHMARKS}{name}.verifier", settings.get("evaluation.verifier"))
    return verifier.get("kind") if isinstance(verifier, dict) else None


def _that_decide(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings without other benchmarks', and without the preset, which only fixes others' values."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        owner = key.rpartition(".")[0]
        if key == PRESET or (owner.startswith(BENCHMARKS) and owner.removeprefix(BENCHMARKS) not in names):
            continue
        if isinstance(value, dict):  # a verifier's settings, which used to have limits that are constants now
            found |= {f"{key}.{name}": each for name, each in value.items() if name not in LIMITS}
        else:
            found[key] = value
    return found


def _words(value: object) -> str:
    return "not set" if value is None else str(value)


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
        if different := sorted(set(ids) ^ set(other.correct)):
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
