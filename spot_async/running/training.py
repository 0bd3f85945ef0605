"""Runs a training run from its first process to its last file: enters what `assembly.py` makes, and leaves it again.

Whatever ends a run (its last iteration, a dead server, Ctrl-C), all children are gone when this returns, and the run
directory is complete up to the last finished iteration. A signal arrives as cancellation: `cli/ending.py` handles it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from rich.console import Console

from spot_async.base import registry
from spot_async.base.events import Channel
from spot_async.base.tasks import alongside, budget_error
from spot_async.base.timeouts import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import BudgetSpentError, StorageError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated, ServersStarting, StepBegan
from spot_async.loop.orchestrator import Orchestrator, OrchestratorState
from spot_async.loop.publishing import LiveEvaluation
from spot_async.loop.resuming import Resumption
from spot_async.loop.stopping import StopRequest
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Backend, Generator, Verifier
from spot_async.replicas.leasing import ServicePool
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.run_directory.manifest import Checkpoint
from spot_async.run_directory.reading import RunFiles
from spot_async.run_directory.room import bytes_of_first
from spot_async.running.assembly import (
    make_live_bottleneck,
    make_orchestrator,
    make_spending,
    make_stages,
    trainer_settings,
)
from spot_async.running.backend_factories import core_shares
from spot_async.running.checkpoints import RunCheckpoints, go_back, put_last_evaluation_aside
from spot_async.running.initial_weights import SENDING_WEIGHTS
from spot_async.running.measuring import finished_evaluation, measure, write_evaluation
from spot_async.running.resuming import beginning_of
from spot_async.running.services import OpenServices, StartListener, open_services
from spot_async.running.summary import TrainOutcome, summarize
from spot_async.stages.stage import Stage
from spot_async.stages.stages import Stages
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.evaluation_history import BestCheckpoint, EvaluationHistory
from spot_async.telemetry.live_bottleneck import replica_lines
from spot_async.telemetry.loop_lag import LoopLag
from spot_async.telemetry.run_log import RunLog, log_events_to
from spot_async.telemetry.sinks import MetricSink, open_sinks
from spot_async.telemetry.spending_log import SpendingLog
from spot_async.telemetry.trace import trace_to
from spot_async.trainer.handle import TrainerProcess
from spot_async.types import WeightSnapshot, WeightVersion
from spot_async.watchdog.monitor import Watchdog

Student: TypeAlias = Generator | ServicePool[Generator]


@dataclass
class RunResults:
    """Holds what a run has come to so far, for its outcome."""

    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    stages: Sequence[Stage[Any]] = ()  # once the servers have answered
    orchestrator: Orchestrator | None = None
    # Set when the money runs out outside of a prompt: in an evaluation, or as a server comes back.
    spent: BudgetSpentError | None = None

    def is_out_of_money(self, error: BaseException) -> None:
        self.spent = self.spent or budget_error(error)
        structlog.get_logger().warning("budget spent", error=str(self.spent))

    def outcome(self, directory: Path, best: BestCheckpoint | None, spending: Mapping[str, Any]) -> TrainOutcome:
        state = OrchestratorState() if self.orchestrator is None else self.orchestrator.state
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
        )


async def train(
    config: Config,
    plan: TrainPlan,
    directory: RunDirectory,
    console: Console,
    *,
    exit_process: Callable[[str], None] | None = None,
    checkpoint: Checkpoint | None = None,
    stop: StopRequest | None = None,
) -> TrainOutcome:
    """Make one training run, evaluated before and after where the configuration says so, and return its outcome.

    `exit_process`: see `Watchdog`. With a `checkpoint` the run goes on from there. `stop` is heard while it trains, if
    it makes checkpoints. Then it ends with one, unfinished.
    """
    run = TrainingRun(config, plan, directory, console, exit_process, checkpoint, stop or StopRequest())
    with ExitStack() as stack:
        sinks = run.open_files(stack)
        outcome = await run.run(sinks)
        structlog.get_logger().info("finished", process="orchestrator", cpu_s=time.process_time())
    if not outcome.stopped:
        directory.write_summary(summarize(config, plan, outcome))
    return outcome


class TrainingRun:
    """The parts of one training run, and the order in which it uses them."""

    def __init__(
        self,
        config: Config,
        plan: TrainPlan,
        directory: RunDirectory,
        console: Console,
        exit_process: Callable[[str], None] | None,
        checkpoint: Checkpoint | None,
        stop: StopRequest,
    ) -> None:
        """Make the parts. Nothing is started."""
        self._config = config
        self._plan = plan
        self._directory = directory
        self._screen = RunConsole(console, plan.schedule.iterations)
        self._spending = make_spending(config, plan)
        self._ledger_file = SpendingLog(directory, self._spending.accounts)
        self._cores = core_shares(plan.served)
        self._watchdog = Watchdog(plan.silence, directory.path, exit_process=exit_process)
        self._history = EvaluationHistory(directory, config.evaluation.best_by if config.evaluation else "avg")
        self._events = Channel()
        self._events.subscribe(self._ledger_file, self._history, self._screen, self._watchdog)
        self._lag = LoopLag()
        self._checkpoint = checkpoint
        self._stop = stop
        self._beginning = beginning_of(config, plan, checkpoint)
        self._ledger: Ledger  # open while the run's files are
        self._trainer = TrainerProcess(
            trainer_settings(config, plan, directory, checkpoint, self._beginning.lineage),
            cores=self._cores.available if self._cores.own else None,
        )
        self._verifier: Verifier = registry.load("verifiers", config.verifier.kind)(config.verifier)
        self._vocabulary = Vocabulary(plan.student.vocabulary.tokenizer, plan.stop_token_ids)  # of evaluations
        self._results = RunResults()
        self._resumption = Resumption()

    def open_files(self, stack: ExitStack) -> Sequence[MetricSink]:
        """Lock the run directory, and enter what must outlive the servers: logs, screen and watchdog."""
        directory = self._directory
        with suppress(StorageError):  # without locks other starts are refused too, but not told who runs
            stack.enter_context(directory.locked())
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        self._ledger = stack.enter_context(closing(Ledger.open(directory.path, self._spending.accounts)))
        if self._checkpoint is not None:
            self._resumption = self._go_back()
            if self._beginning.step < self._plan.schedule.iterations:
                put_last_evaluation_aside(directory.path)
        stack.callback(self._ledger_file.write)  # whatever ends the run
        sinks = stack.enter_context(open_sinks(self._config, directory.path, lambda: self._results.stages))
        if self._checkpoint is not None:
            rows = RunFiles(directory.path).metrics()
            for sink in sinks:
                sink.go_back(rows)
        stack.enter_context(self._screen.live())
        stack.enter_context(self._watchdog)
        stack.enter_context(self._lag.measuring())
        return sinks

    async def run(self, sinks: Sequence[MetricSink]) -> TrainOutcome:
        """Start the servers and the trainer, train, and stop them again."""
        try:
            async with alongside(self._watchdog.watch), self._open_services() as services:
                self._ledger_file.write(iteration=0)  # what was asked during the start
                await self._work(services, sinks)
                self._watchdog.on(StepBegan("stopping"))
        except* BudgetSpentError as spent:
            self._results.is_out_of_money(spent)
        return self._results.outcome(self._directory.path, self._history.best, self._spending.summary())

    def _open_services(self) -> AbstractAsyncContextManager[OpenServices]:
        """Open what the plan serves, with the trainer and the verifier beside it."""
        return open_services(
            self._plan.served,
            self._directory.path,
            run=(self._config, self._plan),
            spending=self._spending,
            cores=self._cores,
            beside=[self._trainer, self._verifier],
            watches=[self._trainer.watch],
            listener=StartListener(self._servers_starting, self._begin, self._screen.warn, self._screen.say),
        )

    def _servers_starting(self, backends: Mapping[str, Backend]) -> None:
        self._events.publish(ServersStarting(partial(replica_lines, backends)))
        self._begin(f"starting {', '.join(self._plan.served)} and trainer")

    async def _work(self, services: OpenServices, sinks: Sequence[MetricSink]) -> None:
        """Evaluate, train, and evaluate again, while the servers live."""
        config, plan, directory = self._config, self._plan, self._directory
        stages = make_stages(config, plan, services, self._verifier, events=self._events)
        self._results.stages = stages.all
        self._results.before = await self._evaluate(services.student, "before", plan.student.directory)
        orchestrator = self._results.orchestrator = self._make_orchestrator(services, stages, sinks)
        if self._checkpoint is not None:
            await self._catch_up(services)
        self._begin(f"training with {config.policy.kind}", orchestrator)
        bottlenecks = make_live_bottleneck(config, orchestrator, services.backends, self._screen.say, directory.cores)
        trace = trace_to(directory.path / "trace.json", orchestrator) if config.run.trace else nullcontext()
        listening = self._stop.heard_by(orchestrator.stop) if config.training.checkpoint_every else nullcontext()
        with trace, listening:
            async with alongside(bottlenecks.speak):
                await orchestrator.run()
        if not orchestrator.state.stopped:
            self._results.after = await self._evaluate_after(services.student, orchestrator.state.iteration)

    def _begin(self, step: str, orchestrator: Orchestrator | None = None) -> None:
        self._events.publish(StepBegan(step, orchestrator))

    def _make_orchestrator(self, services: OpenServices, stages: Stages, sinks: Sequence[MetricSink]) -> Orchestrator:
        """Make the orchestrator, with the log that follows its run."""
        log = RunLog(
            self._directory,
            stages,
            sinks,
            is_strict=self._config.max_staleness == 0,
            samples_every=self._config.run.samples_every,
            backends=services.backends,
            loop_lag=self._lag,
            spending=self._spending.metrics(),
        )
        self._events.subscribe(log)
        student = services.student
        evaluate = LiveEvaluation(partial(evaluation_is_due, self._config), partial(self._evaluate_live, student))
        checkpoints = RunCheckpoints(
            self._directory.path,
            self._config.training,
            iterations=self._plan.schedule.iterations,
            beginning=self._beginning,
            ledger=self._ledger,
            expected_bytes=bytes_of_first(self._plan.student.directory),
        )
        return make_orchestrator(
            self._config,
            self._plan,
            stages,
            self._trainer,
            [student],
            evaluate,
            ledger=self._ledger,
            checkpoints=checkpoints if self._config.training.checkpoint_every else None,
            resumption=self._resumption,
        )

    def _go_back(self) -> Resumption:
        """Make the run directory what it was at the checkpoint."""
        step = self._beginning.step
        resumption = go_back(
            self._directory,
            self._beginning,
            self._ledger,
            max_staleness=self._config.max_staleness,
            batch_size=self._config.training.batch_size,
        )
        self._ledger_file.go_on(self._ledger.spending())
        whens = [path.stem[-6:] for path in self._directory.path.glob("evaluation-??????.json")]
        found = {int(when): self._finished(when) for when in whens if when.isdigit()}
        self._history.go_back({iteration: each for iteration, each in found.items() if each is not None})
        structlog.get_logger().info("resumed", step=step, lineage=self._beginning.lineage)
        return resumption

    def _finished(self, when: str) -> EvaluationResult | None:
        return finished_evaluation(self._config, self._plan.evaluation, self._directory, when)

    async def _catch_up(self, services: OpenServices) -> None:
        """Bring the student's servers, which started with the initial weights, to those of the checkpoint.

        Evaluations that were due before the run ended, and are not complete, are made on the way.
        """
        step, loop = self._beginning.step, asyncio.get_running_loop()
        self._directory.point_student_to(self._directory.weights_after(step))
        for iteration in range(1, step + 1):
            weights = self._directory.weights_after(iteration)
            is_missing = (
                evaluation_is_due(self._config, iteration)
                and weights.is_dir()
                and self._finished(f"{iteration:06d}") is None
            )
            if not is_missing and iteration < step:
                continue
            self._begin(SENDING_WEIGHTS)
            snapshot = WeightSnapshot(directory=str(weights), version=WeightVersion(self._beginning.lineage, iteration))
            await services.student.update_weights(snapshot, deadline=loop.time() + WEIGHT_UPDATE_TIMEOUT_S)
            if is_missing:
                began_s = loop.time()
                result = await self._evaluate(services.student, f"{iteration:06d}", weights)
                if result is not None:
                    self._events.publish(Evaluated(iteration, result, snapshot, loop.time() - began_s))

    async def _evaluate(
        self, student: Student, when: str, weights: Path, beside: Orchestrator | None = None
    ) -> EvaluationResult | None:
        """Return the result of `measure`; None also if the budget ran out meanwhile."""
        result = None
        try:
            result = await measure(
                self._config,
                self._plan.evaluation,
                self._vocabulary,
                student,
                self._directory,
                self._events,
                when,
                weights,
                beside,
            )
        except* BudgetSpentError as spent:
            self._results.is_out_of_money(spent)
        return result

    async def _evaluate_live(self, student: Student, iteration: int) -> EvaluationResult | None:
        """Return the evaluation of the weights that are served: what a `LiveEvaluation` measures."""
        goes_on = self._results.orchestrator if self._config.max_staleness > 0 else None
        result = await self._evaluate(student, f"{iteration:06d}", self._directory.weights_after(iteration), goes_on)
        if iteration < self._plan.schedule.iterations:  # otherwise training is over
            self._begin(f"training with {self._config.policy.kind}", self._results.orchestrator)
        return result

    async def _evaluate_after(self, student: Student, iterations: int) -> EvaluationResult | None:
        """Return the evaluation after training, of the weights that so many iterations made; None if there is none."""
        directory, history = self._directory, self._history
        after, last = history.result_after(iterations), directory.weights_after(iterations)
        if after is not None:  # the last mid-run evaluation had the same weights, problems and seeds
            write_evaluation(self._config, self._plan.evaluation, directory, "after", last, after)
        elif self._results.spent is None:
            after = await self._evaluate(student, "after", last if iterations else self._plan.student.directory)
            if after is not None and history.best is not None:
                history.add(iterations, after, (directory.path / "student").resolve())
        return after


def evaluation_is_due(config: Config, iteration: int) -> bool:
    """Return whether the weights of this iteration (the first one is 1) are evaluated during training."""
    every = config.evaluation.eval_every if config.evaluation is not None else 0
    return every > 0 and iteration % every == 0
