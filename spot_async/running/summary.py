"""Sums up a finished run, as a value for programs and as the contents of `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from spot_async.base.tasks import budget_error
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import BudgetSpentError
from spot_async.evaluation.metrics import finite
from spot_async.evaluation.results import EvaluationResult, paired_change
from spot_async.loop.events import OrchestratorState
from spot_async.loop.orchestrator import Orchestrator
from spot_async.run_directory.reading import RunFiles
from spot_async.stages.stage import Stage
from spot_async.telemetry.evaluations import BestCheckpoint
from spot_async.telemetry.totals import masked_share


@dataclass(frozen=True)
class TrainOutcome:
    """What a finished run came to."""

    directory: Path  # of the run
    student: Path = field(init=False)  # the trained one, a Hugging Face directory; missing without a finished iteration
    iterations: int
    before: EvaluationResult | None
    after: EvaluationResult | None
    best: BestCheckpoint | None  # None without evaluations during the run
    prompts: dict[str, int]  # how many ended in which state
    spent: BudgetSpentError | None = None  # why it ended early, with everything saved
    stopped: bool = False  # somebody asked for its end: what it has trained is saved, and it can continue
    spending: Mapping[str, Any] = field(default_factory=dict)  # what its endpoints were asked, and what that cost
    trainer_restarts: int = 0  # since the command began

    def __post_init__(self) -> None:
        object.__setattr__(self, "student", self.directory / "student")


@dataclass
class RunResults:
    """Holds what a run has come to so far, for its outcome."""

    resumed_after: int = 0  # iterations that earlier parts of the run trained
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    orchestrator: Orchestrator | None = None  # once the servers have answered
    # Set when the money runs out outside of a prompt: in an evaluation, or as a server comes back.
    spent: BudgetSpentError | None = None

    @property
    def stages(self) -> Sequence[Stage[Any]]:
        return () if self.orchestrator is None else self.orchestrator.stages.all

    def is_out_of_money(self, error: BaseException) -> None:
        self.spent = self.spent or budget_error(error)
        structlog.get_logger().warning("budget spent", error=str(self.spent))

    def outcome(
        self, directory: Path, best: BestCheckpoint | None, spending: Mapping[str, Any], trainer_restarts: int
    ) -> TrainOutcome:
        state = (
            OrchestratorState(iteration=self.resumed_after) if self.orchestrator is None else self.orchestrator.state
        )
        counts = {} if self.orchestrator is None else self.orchestrator.book.counts
        prompts = {each.value: count for each, count in counts.items() if count}
        return TrainOutcome(
            directory,
            state.iteration,
            self.before,
            self.after,
            best,
            prompts,
            spent=state.spent or self.spent,
            stopped=state.stopped,
            spending=spending,
            trainer_restarts=trainer_restarts,
        )


def summarize(config: Config, plan: TrainPlan, outcome: TrainOutcome) -> dict[str, Any]:
    """Return the contents of `summary.json`."""
    masked = masked_share(RunFiles(outcome.directory).metrics())
    best = outcome.best
    return {
        "policy": config.policy.kind,
        "iterations": outcome.iterations,
        "prompts": outcome.prompts | {"filtered": plan.filtered},
        "problems": {
            "usable": len(plan.problems) - plan.filtered,
            "rows": dict(plan.rows),
            "left_over_per_epoch": plan.schedule.left_over_per_epoch,  # by its last incomplete batch
        },
        "before": evaluation_summary(outcome.before),
        "after": evaluation_summary(outcome.after),
        "change": change_summary(outcome.before, outcome.after),
        "best": best and asdict(best) | {"criterion": "avg", "optimistic": "picked by the problems it is measured on"},
        **({} if masked is None else {"masked": masked}),
        **outcome.spending,
        **({"trainer_restarts": outcome.trainer_restarts} if outcome.trainer_restarts else {}),
        **({} if outcome.spent is None else {"ended_early": str(outcome.spent)}),
    }


def change_summary(
    before: EvaluationResult | None, after: EvaluationResult | None
) -> dict[str, dict[str, float | None]] | None:
    """Return how Avg@k changed, by tier, paired on problems; None without both evaluations."""
    if before is None or after is None:
        return None
    judged = [name for name, figures in after.rows.items() if figures.avg is not None]
    changes = {name: paired_change(before, after, name) for name in judged}
    return {name: {"avg": change, "avg_standard_error": finite(error)} for name, (change, error) in changes.items()}


def evaluation_summary(result: EvaluationResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "samples": max(benchmark.samples for benchmark in result.benchmarks),
        "tokens": result.tokens,
        "tiers": {
            name: {
                "problems": figures.problems,
                "avg": figures.avg.value,
                "avg_standard_error": figures.avg.standard_error,
                "pass_k": figures.samples,  # k of the next two; for the mean, the largest that all benchmarks have
                "pass": figures.pass_at[figures.samples].value,
                "pass_standard_error": figures.pass_at[figures.samples].standard_error,
            }
            for name, figures in result.rows.items()
            if figures.avg is not None
        },
    }
