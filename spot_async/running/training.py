"""Runs a training run from its first process to its last file: enters what `assembly.py` makes, and leaves it again.

Whatever ends a run (its last iteration, a dead server, Ctrl-C), all children are gone when this returns, and the run
directory is complete up to the last finished iteration. A signal arrives as cancellation: `cli/ending.py` handles it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import structlog
from rich.console import Console

from spot_async.base import registry
from spot_async.base.events import Channel
from spot_async.base.files import numbered
from spot_async.base.processes.private_directory import private_directory, remove_abandoned
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.tasks import alongside, in_thread, watching
from spot_async.base.waiting_room import Turns
from spot_async.checks.device_shares import ranks_on_gpus, starting_order, taking_turns
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import BudgetSpentError, DataError, StorageError, TrainerLostError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated, ServersStarting, StepBegan
from spot_async.loop.orchestrator import Orchestrator
from spot_async.loop.publishing import LiveEvaluation
from spot_async.loop.resuming import Records, Resumption, StopRequest
from spot_async.models.precision import precision
from spot_async.protocols import Backend, Verifier
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RESTARTED, RESUMED, RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.run_directory.manifest import Checkpoint, Manifest
from spot_async.run_directory.reading import RunFiles
from spot_async.run_directory.room import bytes_of_first
from spot_async.run_directory.run_weights import RunWeights
from spot_async.running.assembly import (
    make_live_bottleneck,
    make_orchestrator,
    make_spending,
    make_stages,
    trainer_settings,
)
from spot_async.running.backend_factories import core_shares
from spot_async.running.checkpoints import RunCheckpoints, go_back, put_last_evaluation_aside
from spot_async.running.initial_weights import SENDING_WEIGHTS, initial_weights
from spot_async.running.placed_nodes import placed_nodes
from spot_async.running.ray_places import RayPlaces, placed
from spot_async.running.resuming import beginning_of
from spot_async.running.run_evaluations import RunEvaluations, Student
from spot_async.running.run_trainer import Restarts, RunTrainer, loss_of_trainer
from spot_async.running.services import Companions, OpenServices, StartListener, open_services
from spot_async.running.summary import RunResults, TrainOutcome, summarize
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.failures import FailureLog, MismatchWarning
from spot_async.telemetry.live_bottleneck import replica_lines
from spot_async.telemetry.meters import LoopLag, RunMeters
from spot_async.telemetry.run_log import RunLog, SpendingLog, evaluation_metrics, log_events_to
from spot_async.telemetry.side_sink import MetricSink
from spot_async.telemetry.sinks import open_sinks
from spot_async.telemetry.trace import Trace, trace_to
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.nodes.joined import JoinedNodes
from spot_async.trainer.nodes.topology import Topology
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import WeightSnapshot, WeightVersion
from spot_async.watchdog.monitor import Watchdog


@dataclass(frozen=True)
class Part:
    """A part of a run. The first begins where the command does, each other one where a trainer was lost."""

    beginning: Manifest
    checkpoint: Checkpoint | None = None  # None: it begins with the initial weights
    resumption: Resumption = field(default_factory=Resumption)


async def train(
    config: Config,
    plan: TrainPlan,
    directory: RunDirectory,
    console: Console,
    *,
    exit_process: Callable[[str], None] | None = None,
    checkpoint: Checkpoint | None = None,
    stop: StopRequest | None = None,
    topology: Topology | None = None,
) -> TrainOutcome:
    """Make one training run, evaluated before and after where the configuration says so, and return its outcome.

    `exit_process`: see `Watchdog`. With a `checkpoint` the run continues from there. `stop` is heard while it trains,
    if it makes checkpoints. Then it ends with one, unfinished. With a `topology`, of which this is node 0, the other
    nodes join it.
    """
    run = TrainingRun(config, plan, directory, console, exit_process, checkpoint, stop or StopRequest(), topology)
    with ExitStack() as stack:
        sinks = run.open_files(stack)
        outcome = await run.run(sinks)
        structlog.get_logger().info("finished", process="orchestrator", cpu_s=time.process_time())
        if not outcome.stopped:  # before sinks are closed, which may take a while
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
        topology: Topology | None,
    ) -> None:
        """Make the parts. Nothing is started."""
        self._config = config
        self._plan = plan
        self._directory = directory
        self._screen = RunConsole(console, plan.schedule.iterations)
        self._spending = make_spending(config, plan)
        self._ledger_file = SpendingLog(directory, self._spending.accounts)
        self._cores = core_shares(plan.served)
        silence = plan.silence
        if silence is not None and topology is not None:
            silence = silence.with_longer_start(config.cluster.join_timeout_s)
        self._watchdog = Watchdog(silence, directory.path, exit_process=exit_process)
        self._nodes = None if topology is None else JoinedNodes(topology, config, self._screen.say)
        self._events = Channel()
        self._results = RunResults(0 if checkpoint is None else checkpoint.manifest.step)
        self._evaluations = RunEvaluations(config, plan, directory, self._events, self._results)
        self._failures = FailureLog(self._screen.say, self._results.resumed_after)
        self._events.subscribe(
            self._ledger_file, self._evaluations.history, self._screen, self._watchdog, self._failures
        )
        self._lag = LoopLag()
        self._stop = stop
        self._part = Part(beginning_of(config, plan, checkpoint), checkpoint)
        self._ledger: Ledger  # open while the run's files are
        self._order = starting_order(plan.served, ranks_on_gpus(config))
        self._turns = Turns(self._order)
        self._trainer = RunTrainer(self._make_trainer, self._turns)
        self._restarts = Restarts(config.training.restarts if config.training.checkpoint_every else 0)
        self._verifier: Verifier = registry.load("verifiers", config.verifier.kind)(config.verifier)

    def open_files(self, stack: ExitStack) -> Sequence[MetricSink]:
        """Lock the run directory, and enter what must outlive the servers: watchdog, logs and screen."""
        directory = self._directory
        with suppress(StorageError):  # without locks other starts are refused too, but not told who runs
            stack.enter_context(directory.locked())
        stack.enter_context(self._watchdog)  # before whatever may hang when it is closed
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        if (parent := self._config.training.weights_directory) is not None:
            published = stack.enter_context(private_directory("spot-weights-", Path(parent).resolve()))
            directory.weights = RunWeights(directory.path, published)
        stack.callback(directory.weights.flush)
        self._ledger = stack.enter_context(closing(Ledger.open(directory.path, self._spending.accounts)))
        if self._part.checkpoint is not None:
            self._remove_earlier_weights()
            self._part = self._go_back(self._part.beginning, self._part.checkpoint)
            if self._part.beginning.step < self._plan.schedule.iterations:
                put_last_evaluation_aside(directory.path)
            self._ledger_file.go_on(self._ledger.spending())
            self._say_what_is_published_again()
            structlog.get_logger().info(RESUMED, step=self._part.beginning.step, lineage=self._part.beginning.lineage)
        stack.callback(self._ledger_file.write)  # whatever ends the run
        stack.callback(self._failures.close)
        sinks = stack.enter_context(
            open_sinks(self._config, directory.path, lambda: self._results.stages, self._screen.warn)
        )
        stack.enter_context(self._screen.live())
        stack.enter_context(self._lag.measuring())
        return sinks

    async def run(self, sinks: Sequence[MetricSink]) -> TrainOutcome:
        """Start the servers and the trainer, train, and stop them again."""
        try:
            cluster, path = self._config.cluster, self._directory.path
            async with (
                alongside(self._watchdog.watch),
                placed(self._plan.served, cluster, path, cluster.placed_nodes) as places,
                placed_nodes(self._nodes, places.nodes, cluster, path),
                nullcontext() if self._nodes is None else self._nodes.open(),
                self._open_services(places) as services,
            ):
                self._ledger_file.write(iteration=0)  # what was asked during the start
                await self._work(services, sinks)
                self._watchdog.on(StepBegan("stopping"))
        except* BudgetSpentError as spent:
            self._results.is_out_of_money(spent)
        return self._results.outcome(
            self._directory.path, self._evaluations.best, self._spending.summary(), self._restarts.count
        )

    def _open_services(self, places: RayPlaces) -> AbstractAsyncContextManager[OpenServices]:
        """Open what the plan serves, with the trainer and the verifier beside it."""
        return open_services(
            places.served,
            self._directory.path,
            run=(self._config, self._plan),
            beside=Companions(
                entered=[self._trainer, self._verifier],
                watches=[places.watch],
                spending=self._spending,
                cores=self._cores,
                turns=self._turns,
                listener=StartListener(
                    starting=self._servers_starting,
                    step=self._begin,
                    warn=self._screen.warn,
                    waiting=self._screen.say,
                ),
            ),
        )

    def _servers_starting(self, backends: Mapping[str, Backend]) -> None:
        self._events.publish(ServersStarting(partial(replica_lines, backends)))
        for line in taking_turns(self._order):
            self._screen.say(line)
        self._begin(f"starting {', '.join(self._plan.served)} and trainer")

    async def _work(self, services: OpenServices, sinks: Sequence[MetricSink]) -> None:
        """Evaluate, train, and evaluate again, while the servers live."""
        compared = precision(self._config.training.dtype, services.capabilities["student"].dtype)
        self._events.subscribe(MismatchWarning(compared, self._screen.warn))
        before = self._results.before = await self._evaluations.before(services.student)
        if self._part.checkpoint is not None:
            self._tell(sinks)
        elif before is not None:
            for sink in sinks:
                sink.write(0, evaluation_metrics(before))
        with trace_to(self._directory.path / "trace.json") if self._config.run.trace else nullcontext() as trace:
            while (loss := await self._train(services, sinks, trace)) is not None:
                await self._begin_again(services, loss)
                self._tell(sinks)
        assert self._results.orchestrator is not None
        state = self._results.orchestrator.state
        if not state.stopped:
            after = self._results.after = await self._evaluations.after(services.student, state.iteration)
            if after is not None and state.iteration not in self._evaluations.told():
                for sink in sinks:
                    sink.conclude(state.iteration, evaluation_metrics(after))
        if self._nodes is not None:
            self._nodes.ends("stopped" if state.stopped else "done")

    async def _train(
        self, services: OpenServices, sinks: Sequence[MetricSink], trace: Trace | None
    ) -> TrainerLostError | None:
        """Train one part of the run. Return the loss of its trainer, if that is what ended it early."""
        config = self._config
        orchestrator = self._results.orchestrator = self._make_orchestrator(services, sinks)
        self._results.stages = orchestrator.stages.all
        if trace is not None:
            trace(orchestrator)
        try:
            if self._restarts.count:  # the first one was started beside the servers
                await self._trainer.start()
            if self._part.beginning.lineage:
                await self._catch_up(services, orchestrator)
            self._begin(f"training with {config.policy.kind}", orchestrator)
            bottlenecks = make_live_bottleneck(
                config, orchestrator, services.backends, self._screen.say, self._directory.cores
            )
            with self._stop.heard_by(orchestrator.stop) if config.training.checkpoint_every else nullcontext():
                async with watching(self._trainer.watch), alongside(bottlenecks.speak):
                    await orchestrator.run()
        except (TrainerLostError, BaseExceptionGroup) as failures:
            loss = loss_of_trainer(failures)
            task = asyncio.current_task()
            if loss is None or (task is not None and task.cancelling()):
                raise
            if not orchestrator.state.stopped:
                return loss
            self._screen.warn(f"{loss}: what it did since the newest checkpoint is not saved")
        return None

    async def _begin_again(self, services: OpenServices, loss: TrainerLostError) -> None:
        """Go back to where a run would be resumed, for another part with another trainer. The servers stay.

        Raises the loss if there is no restart left.
        """
        assert self._results.orchestrator is not None
        self._restarts.after(loss, self._results.orchestrator.trained.step)
        self._begin("restarting the trainer")
        await self._trainer.stop()
        if isinstance(services.student, ReplicaPool):
            services.student.withdraw_weights()
        run, before = self._directory.path, self._part.beginning
        try:
            checkpoint = await in_thread(manifest.newest, run) if manifest.committed(run) else None
        except DataError as damaged:
            raise TrainerLostError(f"{loss}; {damaged}") from None
        step = 0 if checkpoint is None else checkpoint.manifest.step
        beginning = msgspec.structs.replace(before, step=step, lineages=(*before.lineages, step))
        self._part = self._go_back(beginning, checkpoint)
        most = self._config.training.restarts
        self._screen.warn(f"{loss}; continuing after iteration {step} (restart {self._restarts.count} of {most})")
        structlog.get_logger().warning(RESTARTED, reason=str(loss), step=step, lineage=beginning.lineage)

    def _make_trainer(self) -> TrainerProcess:
        part = self._part
        return TrainerProcess(
            trainer_settings(self._config, self._plan, self._directory, part.checkpoint, part.beginning.lineage),
            cores=self._cores.available if self._cores.own else None,
            nodes=self._nodes,
        )

    def _begin(self, step: str, orchestrator: Orchestrator | None = None) -> None:
        self._events.publish(StepBegan(step, orchestrator))

    def _make_orchestrator(self, services: OpenServices, sinks: Sequence[MetricSink]) -> Orchestrator:
        """Make the orchestrator of a part of the run, with its stages and the log that follows it.

        They have a channel of their own, since what listens to one part must not hear the next.
        """
        events = Channel()
        events.subscribe(self._events)
        stages = make_stages(self._config, self._plan, services, self._verifier, events=events)
        log = RunLog(
            self._directory,
            stages,
            sinks,
            RunMeters(services.backends, self._lag, self._spending.metrics()),
            is_strict=self._config.max_staleness == 0,
            samples_every=self._config.run.samples_every,
            evaluations=self._evaluations.untold(self._part.beginning.lineage),
        )
        events.subscribe(log)
        student = services.student
        evaluate = LiveEvaluation(self._evaluations.is_due, partial(self._evaluate_live, student))
        checkpoints = RunCheckpoints(
            self._directory,
            self._config.training,
            iterations=self._plan.schedule.iterations,
            beginning=self._part.beginning,
            ledger=self._ledger,
            expected_bytes=bytes_of_first(self._plan.student.directory, self._config.training.lora),
        )
        return make_orchestrator(
            self._config,
            self._plan,
            stages,
            self._trainer,
            student,
            evaluate,
            Records(
                self._ledger,
                checkpoints if self._config.training.checkpoint_every else None,
                self._part.resumption,
            ),
        )

    def _go_back(self, beginning: Manifest, checkpoint: Checkpoint | None) -> Part:
        """Make the run directory what it was where the next part of the run begins."""
        resumption = go_back(
            self._directory,
            beginning,
            self._ledger,
            max_staleness=self._config.max_staleness,
            batch_size=self._config.training.batch_size,
        )
        self._evaluations.go_back()
        return Part(beginning, checkpoint, resumption)

    def _remove_earlier_weights(self) -> None:
        """Remove weights outside of the run directory that a killed process of this run left, wherever it had them."""
        with suppress(OSError, ValueError):  # trainer.json is lost, or of another version
            earlier = TrainerSettings.load(str(self._directory.path / "trainer.json"))
            remove_abandoned(earlier.weights_directory.parent)

    def _say_what_is_published_again(self) -> None:
        """Say that the trainer publishes the checkpoint's weights, where those that it published are gone."""
        step, published = self._part.beginning.step, self._directory.weights.published
        if not numbered(published, "step", step).exists():
            self._screen.say(
                f"the weights of iteration {step} are published again, from its checkpoint, to {published}"
            )

    def _tell(self, sinks: Sequence[MetricSink]) -> None:
        """Tell the sinks which iterations are still true, beginning with the evaluation before training."""
        before = evaluation_metrics(self._results.before)
        rows = [*([{"iteration": 0.0, **before}] if before else []), *RunFiles(self._directory.path).metrics()]
        for sink in sinks:
            sink.go_back(rows)

    async def _catch_up(self, services: OpenServices, orchestrator: Orchestrator) -> None:
        """Bring the student's servers, which have other weights, to those that the part of the run begins with.

        Evaluations that were due before, and are not complete, are made on the way.
        """
        step, lineage = self._part.beginning.step, self._part.beginning.lineage
        loop = asyncio.get_running_loop()
        if step == 0:
            self._begin(SENDING_WEIGHTS)
            snapshot = initial_weights(self._config.student, lineage)
            await services.student.update_weights(snapshot, deadline=loop.time() + WEIGHT_UPDATE_TIMEOUT_S)
            return
        await in_thread(self._directory.weights.keep, step)
        for iteration in range(1, step + 1):
            is_missing = self._evaluations.is_missing(iteration)
            if not is_missing and iteration < step:
                continue
            self._begin(SENDING_WEIGHTS)
            weights = str(self._directory.weights.after(iteration))
            snapshot = WeightSnapshot(directory=weights, version=WeightVersion(lineage, iteration))
            await services.student.update_weights(snapshot, deadline=loop.time() + WEIGHT_UPDATE_TIMEOUT_S)
            if is_missing:
                began_s = loop.time()
                result = await self._evaluations.of(services.student, iteration)
                if result is not None:
                    orchestrator.stages.events.publish(Evaluated(iteration, result, snapshot, loop.time() - began_s))

    async def _evaluate_live(self, student: Student, iteration: int) -> EvaluationResult | None:
        """Return the evaluation of the weights that are served: what a `LiveEvaluation` measures."""
        goes_on = self._results.orchestrator if self._config.max_staleness > 0 else None
        result = await self._evaluations.of(student, iteration, goes_on)
        if iteration < self._plan.schedule.iterations:  # otherwise training is over
            self._begin(f"training with {self._config.policy.kind}", self._results.orchestrator)
        return result
