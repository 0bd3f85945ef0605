"""Makes the evaluations of a training run: before, in between and after. One that is there already is read.

An evaluation in which the money runs out has no result, and `RunResults` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from spot_async.base.events import Channel
from spot_async.base.tasks import in_thread
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import BudgetSpentError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated, TrainingView
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator
from spot_async.replicas.leasing import ServicePool
from spot_async.run_directory.layout import RunDirectory, evaluated
from spot_async.run_directory.reading import RunFiles, evaluated_iteration, has_evaluation
from spot_async.running.measuring import Occasion, finished_evaluation, measure, write_evaluation
from spot_async.running.summary import RunResults
from spot_async.telemetry.evaluations import EvaluationHistory
from spot_async.telemetry.run_log import evaluation_metrics
from spot_async.types import WeightSnapshot, WeightVersion

Student: TypeAlias = Generator | ServicePool[Generator]


class RunEvaluations:
    """The evaluations of one run, and their history."""

    def __init__(
        self, config: Config, plan: TrainPlan, directory: RunDirectory, events: Channel, results: RunResults
    ) -> None:
        self.history = EvaluationHistory(directory)
        self._config = config
        self._plan = plan
        self._directory = directory
        self._vocabulary = Vocabulary(plan.student.vocabulary.tokenizer, plan.stop_token_ids)
        self._events = events
        self._results = results
        self._untold: dict[int, EvaluationResult] = {}

    def is_due(self, iteration: int) -> bool:
        """Return whether the weights of this iteration (the first one is 1) are evaluated during training."""
        every = self._config.evaluation.eval_every if self._config.evaluation is not None else 0
        return every > 0 and iteration % every == 0

    def is_missing(self, iteration: int) -> bool:
        """Return whether an evaluation that is due was not completed, and can still be made."""
        is_there = self._directory.weights.after(iteration).is_dir()
        return self.is_due(iteration) and is_there and self._finished(f"{iteration:06d}") is None

    def go_back(self) -> None:
        """Forget all evaluations but those whose files are there."""
        found = {int(when): self._finished(when) for when in evaluated(self._directory.path) if when.isdigit()}
        kept = {iteration: each for iteration, each in found.items() if each is not None}
        self.history.go_back(kept)
        self._untold = {iteration: kept[iteration] for iteration in sorted(kept.keys() - self.told())}

    def told(self) -> set[int]:
        """Return the iterations whose evaluations stand in metrics.jsonl."""
        rows = RunFiles(self._directory.path).metrics()
        return {evaluated_iteration(int(row["iteration"]), row) for row in rows if has_evaluation(row)}

    def untold(self, lineage: int) -> list[Evaluated]:
        """Return the evaluations that still count although no row of metrics has them any more, by iteration.

        In an asynchronous run such a row may be that of an iteration that is made again.
        """
        return [
            Evaluated(
                iteration,
                result,
                WeightSnapshot(
                    directory=str(self._directory.weights.after(iteration)), version=WeightVersion(lineage, iteration)
                ),
                seconds=0.0,
            )
            for iteration, result in self._untold.items()
        ]

    async def figures(self, iteration: int) -> Mapping[str, float]:
        """Return the metrics of an evaluation that is due, from its files: what they say after a resume too."""
        found = await in_thread(self._finished, f"{iteration:06d}") if self.is_due(iteration) else None
        return evaluation_metrics(found)

    async def before(self, student: Student) -> EvaluationResult | None:
        return await self._measure(student, "before", self._plan.student.directory)

    async def of(self, student: Student, iteration: int, beside: TrainingView | None = None) -> EvaluationResult | None:
        """Evaluate the weights of an iteration, which are served. `beside` is what trains meanwhile."""
        weights = self._directory.weights.after(iteration)
        result = await self._measure(student, f"{iteration:06d}", weights, beside)
        if result is not None and self.history.better(iteration, result) is not None:
            await in_thread(self._directory.weights.copy_best, weights)  # `history` need not, which may not wait
        return result

    async def after(self, student: Student, iterations: int) -> EvaluationResult | None:
        """Return the evaluation after training, of the weights that so many iterations made; None if there is none."""
        directory, history = self._directory, self.history
        after, last = history.result_after(iterations), directory.weights.after(iterations)
        if after is not None:  # the last mid-run evaluation had the same weights, problems and seeds
            write_evaluation(self._config, self._plan.evaluation, Occasion(directory, last, "after"), after)
        elif self._results.spent is None:
            after = await self._measure(student, "after", last if iterations else self._plan.student.directory)
            if after is not None and history.best is not None:
                history.add(iterations, after, (directory.path / "student").resolve())
        return after

    def _finished(self, when: str) -> EvaluationResult | None:
        return finished_evaluation(self._config, self._plan.evaluation, self._directory, when)

    async def _measure(
        self, student: Student, when: str, weights: Path, beside: TrainingView | None = None
    ) -> EvaluationResult | None:
        """Return the result of `measure`; None also if the budget ran out meanwhile."""
        result = None
        try:
            result = await measure(
                self._config,
                self._plan.evaluation,
                self._vocabulary,
                student,
                Occasion(self._directory, weights, when),
                self._events,
                beside,
            )
        except* BudgetSpentError as spent:
            self._results.is_out_of_money(spent)
        return result
