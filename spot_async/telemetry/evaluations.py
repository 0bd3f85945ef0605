"""Evaluations of a run: keeps the best student that they have found, and makes the table that `spot-async eval` prints.

The best has the highest figure over all problems; of equal ones, it is the earliest. It is picked on the problems that
it is measured on, so its figure is optimistic, and whoever shows it says so. Nothing is evaluated here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spot_async.base.events import Event
from spot_async.base.text import visible, with_error
from spot_async.config.evaluation import MACRO
from spot_async.evaluation.metrics import BenchmarkFigures, Estimate, EvaluationFigures, Figures, over_all
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated
from spot_async.run_directory.layout import RunDirectory
from spot_async.telemetry.screen import number_table
from spot_async.types import Verdict


@dataclass(frozen=True)
class BestCheckpoint:
    """The best student so far; its weights are `best` in the run directory."""

    iteration: int
    samples: int  # responses per problem, which is the k of Avg@k and Pass@k
    value: float  # its figure, in [0, 1]
    standard_error: float


class EvaluationHistory:
    """Follows the evaluations of a run, as a listener. `best` is None before the first."""

    def __init__(self, directory: RunDirectory) -> None:
        self.best: BestCheckpoint | None = None
        self._last: tuple[int, EvaluationResult] | None = None  # (iteration before it, newest evaluation)
        self._directory = directory

    def on(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.add(event.iteration, event.result, Path(event.weights.directory))

    def result_after(self, iteration: int) -> EvaluationResult | None:
        """Return the newest evaluation if it was made after `iteration`, else None."""
        return self._last[1] if self._last is not None and self._last[0] == iteration else None

    def go_back(self, evaluations: Mapping[int, EvaluationResult]) -> None:
        """Begin anew with the evaluations that still count, by iteration. Keep the best of the weights that are there.

        A kill may have come after an evaluation and before its weights were kept.
        """
        self.best, self._last = None, max(evaluations.items(), key=itemgetter(0), default=None)
        kept: Path | None = None
        for iteration, evaluation in sorted(evaluations.items()):
            places = self._directory.weights.best_after(iteration), self._directory.weights.after(iteration)
            weights = next((each for each in places if each.exists()), None)
            if weights is not None and (better := self.better(iteration, evaluation)) is not None:
                self.best, kept = better, weights
        if kept is not None:
            self._directory.weights.keep_best(kept)

    def add(self, iteration: int, evaluation: EvaluationResult, weights: Path) -> None:
        """Take note of an evaluation of `weights`, and keep them if they are the best so far."""
        self._last = (iteration, evaluation)
        if (better := self.better(iteration, evaluation)) is not None:
            self.best = better
            self._directory.weights.keep_best(weights)

    def better(self, iteration: int, evaluation: EvaluationResult) -> BestCheckpoint | None:
        """Return what counts of an evaluation if it is better than all before; else None, as if nothing was judged."""
        figures = over_all(evaluation.rows)
        if figures is None or figures.avg is None:
            return None
        if self.best is not None and figures.avg.value <= self.best.value:
            return None
        error = math.nan if figures.avg.standard_error is None else figures.avg.standard_error
        return BestCheckpoint(iteration, figures.samples, figures.avg.value, error)


NOT_JUDGED = (Verdict.TIMEOUT, Verdict.ERROR)
COUNTED = (Verdict.NO_ANSWER, *NOT_JUDGED)  # verdicts with a column; the accuracy tells the others


def figures_table(figures: EvaluationFigures) -> RenderableType:
    """Return the table of accuracies, with their notes, and the table of what the responses were like below it.

    Each benchmark has a row; several have one more for their mean. If there is only one, its tiers have rows too.
    """
    # Titles are lines of their own, since rich would wrap a table's title to the table's width.
    return Group(
        Text(f"Percent ± standard error over the n problems of a {kind_of_row(figures)}", style="bold"),
        accuracy_table(figures),
        *(Text(visible(note)) for note in notes(figures)),
        Text(
            "\nResponses: mean tokens, percent cut off at the longest length, number without an answer or a verdict",
            style="bold",
        ),
        responses_table(figures),
    )


def accuracy_table(figures: EvaluationFigures) -> Table:
    # Pass@1 is Avg@n, which has a column already.
    ks = sorted({k for each in figures.benchmarks.values() for k in each.pass_at if k > 1})
    ns = {each.samples for each in figures.benchmarks.values() if each.avg is not None}
    average = f"Avg@{ns.pop()}" if len(ns) == 1 else "Avg"
    votes = [f"maj{average[3:]}"] if any(each.maj for each in figures.benchmarks.values()) else []
    table = number_table(kind_of_row(figures), "n", average, *(f"Pass@{k}" for k in ks), *votes)
    judged = {marked(name, each): each for name, each in figures.rows.items() if each.avg is not None}
    for number, (name, each) in enumerate(judged.items(), start=1):
        problems = "" if name == MACRO else str(each.problems)
        cells = [problems, estimate_words(each.avg), *(estimate_words(each.pass_at.get(k)) for k in ks)]
        cells += [estimate_words(each.maj)] if votes else []
        table.add_row(Text(visible(name)), *cells, end_section=number == len(judged) - 1)
    return table


def responses_table(figures: EvaluationFigures) -> Table:
    headings = (
        kind_of_row(figures),
        "responses",
        "tokens",
        "cut off",
        *(verdict.value.replace("_", " ") for verdict in COUNTED),
    )
    table = number_table(*headings)
    rows = {marked(name, each): each for name, each in figures.rows.items() if name != MACRO}
    for number, (name, each) in enumerate(rows.items(), start=1):
        responses = each.problems * each.samples
        counts = _counts(responses, each.tokens, each.truncated, each.verdicts)
        table.add_row(Text(visible(name)), *counts, end_section=number == len(rows))
    if len(figures.benchmarks) > 1:
        responses = sum(each.problems * each.samples for each in figures.benchmarks.values())
        table.add_row("all", *_counts(responses, figures.tokens, figures.truncated, figures.verdicts))
    return table


def kind_of_row(figures: EvaluationFigures) -> str:
    """Return what a row is: a tier of a single benchmark, or a benchmark."""
    return "tier" if len(figures.benchmarks) == 1 else "benchmark"


def _counts(responses: int, tokens: int, truncated: float, verdicts: Mapping[str, int]) -> list[str]:
    classes = [f"{verdicts[verdict.value]:,}" if verdicts else "" for verdict in COUNTED]
    return [f"{responses:,}", f"{tokens / responses:,.0f}", f"{100 * truncated:.1f}", *classes]


def notes(figures: EvaluationFigures) -> Iterator[str]:
    """Return the notes that people need to compare the figures."""
    for name, each in figures.benchmarks.items():
        if each.note is not None:
            yield f"* {name}: {each.note}"
        if each.math_verify is not None:
            own, ours = estimate_words(each.math_verify), estimate_words(each.avg)
            yield f"{name}: {own} by math_verify, which is other people's figure, and {ours} by math"
    macro = figures.macro
    if macro is not None and len(figures.benchmarks) > 1:
        yield f"macro: unweighted mean over {', '.join(macro.benchmarks)}"
    missing = sum(figures.verdicts.get(verdict.value, 0) for verdict in NOT_JUDGED)
    if missing:
        yield f"{missing} responses could not be judged (timeout, error) and count as incorrect"


def estimate_words(estimate: Estimate | None) -> str:
    """Return a figure in percent with its error; an empty text if nothing was judged."""
    return "" if estimate is None else with_error(estimate.value, estimate.standard_error)


def marked(row: str, figures: Figures | None) -> str:
    """Return the name of a table's row, with a star where a note below says more."""
    return f"{row} *" if isinstance(figures, BenchmarkFigures) and figures.note is not None else row
