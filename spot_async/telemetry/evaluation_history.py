"""Keeps the best student that evaluations during a run have found.

The best has the highest figure over all problems; of equal ones, it is the earliest. It is picked on the problems that
it is measured on, so its figure is optimistic, and whoever shows it says so. Nothing is evaluated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal

from spot_async.base.events import Event
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated
from spot_async.run_directory.layout import RunDirectory

Criterion = Literal["avg", "pass"]


@dataclass(frozen=True)
class BestCheckpoint:
    """The best student so far; its weights are `best` in the run directory."""

    iteration: int
    criterion: Criterion
    samples: int  # responses per problem, which is the k of Avg@k and Pass@k
    value: float  # its figure, in [0, 1]
    standard_error: float


class EvaluationHistory:
    """Follows the evaluations of a run, as a listener. `best` is None before the first."""

    def __init__(self, directory: RunDirectory, criterion: Criterion) -> None:
        self.best: BestCheckpoint | None = None
        self._last: tuple[int, EvaluationResult] | None = None  # (iteration before it, newest evaluation)
        self._directory = directory
        self._criterion = criterion

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
        weights: dict[int, Path] = {}
        for iteration, evaluation in sorted(evaluations.items()):
            places = self._directory.weights.best_after(iteration), self._directory.weights.after(iteration)
            if found := [each for each in places if each.exists()]:
                weights[iteration] = found[0]
                self._note(iteration, evaluation)
        if self.best is not None:
            self._directory.weights.keep_best(weights[self.best.iteration])

    def would_be_best(self, iteration: int, evaluation: EvaluationResult) -> bool:
        """Return whether the weights of an evaluation are better than all before."""
        found = self._figure(iteration, evaluation)
        return found is not None and (self.best is None or found.value > self.best.value)

    def add(self, iteration: int, evaluation: EvaluationResult, weights: Path) -> None:
        """Take note of an evaluation of `weights`, and keep them if they are the best so far."""
        self._last = (iteration, evaluation)
        before = self.best
        self._note(iteration, evaluation)
        if self.best is not before:
            self._directory.weights.keep_best(weights)

    def _note(self, iteration: int, evaluation: EvaluationResult) -> None:
        if self.would_be_best(iteration, evaluation):
            self.best = self._figure(iteration, evaluation)

    def _figure(self, iteration: int, evaluation: EvaluationResult) -> BestCheckpoint | None:
        """Return what counts of an evaluation; None if nothing was judged, so no student is better than another."""
        figures = evaluation.figures()
        if figures.avg is None:
            return None
        estimate = figures.avg if self._criterion == "avg" else figures.pass_at[figures.samples]
        error = math.nan if estimate.standard_error is None else estimate.standard_error
        return BestCheckpoint(iteration, self._criterion, figures.samples, estimate.value, error)
