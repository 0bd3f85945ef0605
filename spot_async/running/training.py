"""Runs a training run from its first process to its last file: enters what `assembly.py` makes, and leaves it again.

Whatever ends a run (its last iteration, a dead server, Ctrl-C), all children are gone when this returns, and the run
directory is complete up to the last finished iteration. A signal arrives as cancellation: `cli/ending.py` handles it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from rich.console import Console

from spot_async.base.events import Channel
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import alongside, entered_in_thread, in_thread
from spot_async.base.waiting_room import Turns
from spot_async.checks.device_shares import TRAINER, ranks_on_gpus, starting_order, taking_turns
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import BudgetSpentError, StorageError
from spot_async.loop.events import IterationFinished, OrchestratorState, RunEvent, ServersStarting, StepBegan
from spot_async.loop.resuming import StopRequest
from spot_async.models.precision import precision
from spot_async.protocols import Backend
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory.layout import FELL, MISMATCHED, NO_ADVICE, NO_TURNS, RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.run_directory.manifest import Checkpoint
from spot_async.run_directory.reading import RunFiles
from spot_async.run_directory.run_weights import RunWeights
from spot_async.running.assembly import make_environments, make_spending, make_verifier
from spot_async.running.part import OpenRun, Part
from spot_async.running.ray_places import RayPlaces, placed, placed_nodes
from spot_async.running.resuming import Beginning, Beginnings
from spot_async.running.run_evaluations import RunEvaluations
from spot_async.running.run_trainer import Restarts, trainer_settings
from spot_async.running.services import Companions, OpenServices, StartListener, core_shares, open_services
from spot_async.running.summary import RunResults, TrainOutcome, summarize
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.failures import EntropyHistory, FailureLog, IterationWarning, mismatch_words, unplayed_words
from spot_async.telemetry.live_bottleneck import replica_lines
from spot_async.telemetry.meters import LoopLag
from spot_async.telemetry.outcome_slope import OutcomeHistory
from spot_async.telemetry.run_log import SpendingLog, evaluation_metrics, log_events_to, sample_texts
from spot_async.telemetry.side_sink import MetricSink
from spot_async.telemetry.sinks import open_sinks
from spot_async.telemetry.trace import trace_to
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.nodes.joined import JoinedNodes
from spot_async.trainer.nodes.topology import Topology
from spot_async.trainer.settings import TrainerSettings
from spot_async.watchdog.monitor import Watchdog


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a command, or a program, starts a run."""

    checkpoint: Checkpoint | None = None  # the run continues from there
    # Heard while the run trains, if it makes checkpoints. Then it ends with one, unfinished.
    stop: StopRequest = field(default_factory=StopRequest)
    topology: Topology | None = None  # the other nodes, of which this is node 0, join the run
    exit_process: Callable[[str], None] | None = None  # see `Watchdog`
    report: Sequence[str] = ()  # the program that writes the report of the run that is its last word


async def train(
    config: Config, plan: TrainPlan, directory: RunDirectory, console: Console, start: Start | None = None
) -> TrainOutcome:
    """Make one training run, evaluated before and after where the configuration says so, and return its outcome."""
    with ExitStack() as stack:
        run = TrainingRun(config, plan, directory, console, start or Start(), stack)
        await run.prepare(stack)
        async with entered_in_thread(run.open_sinks()) as run.sinks:
            outcome = await run.run()
            structlog.get_logger().info("finished", process="orchestrator", cpu_s=time.process_time())
            if not outcome.stopped:  # before sinks are closed, which may take a while
                await in_thread(directory.write_summary, summarize(config, plan, outcome))
    return outcome


class TrainingRun(OpenRun):
    """A training run whose files are open, and the order in which its servers, trainer and parts come and end."""

    def __init__(
        self,
        config: Config,
        plan: TrainPlan,
        directory: RunDirectory,
        console: Console,
        start: Start,
        stack: ExitStack,
    ) -> None:
        """Lock the run directory, and enter on `stack` what must outlive the servers: watchdog, logs and screen."""
        self.config = config
        self.plan = plan
        self.directory = directory
        self._start = start
        self.screen = RunConsole(console, plan.schedule.iterations)
        self._spending = make_spending(config, plan)
        self._spending_log = SpendingLog(directory, self._spending.accounts)
        self._cores = core_shares(plan.served)
        silence = plan.silence
        if silence is not None and start.topology is not None:
            silence = {**silence, None: silence[None] + config.cluster.join_timeout_s}
        self._watchdog = Watchdog(silence, directory.path, exit_process=start.exit_process)
        self._nodes = None if start.topology is None else JoinedNodes(start.topology, config, self.screen.say)
        self.events = Channel()
        self._results = RunResults(0 if start.checkpoint is None else start.checkpoint.manifest.step)
        self.evaluations = RunEvaluations(config, plan, directory, self.events, self._results)
        failures = FailureLog(self.screen.say, self._results.resumed_after)
        self.events.subscribe(failures, to=failures.hears)
        history = self.evaluations.history
        self.events.subscribe(self._spending_log, history, self.screen, self._watchdog, to=RunEvent)
        self.lag = LoopLag()
        self._order = starting_order(plan.served, ranks_on_gpus(config.training, config.cluster.nodes or 1))
        self._turns = Turns(self._order)
        self._restarts = Restarts(config.training.restarts if config.training.checkpoint_every else 0)
        self.verifier = make_verifier(config, self._spending)
        self.environments = make_environments(plan)

        with suppress(StorageError):  # without locks other starts are refused too, but not told who runs
            stack.enter_context(directory.locked())
        stack.enter_context(self._watchdog)  # before whatever may hang when it is closed
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        if (parent := config.training.weights_directory) is not None:
            published = stack.enter_context(private_directory("spot-weights-", Path(parent).resolve()))
            directory.weights = RunWeights(directory.path, published)
        stack.callback(directory.weights.flush)
        self.ledger = stack.enter_context(closing(Ledger.open(directory.path, self._spending.accounts)))
        self._beginnings = Beginnings(config, plan, directory, self.ledger, self.evaluations)
        self._checkpoint = start.checkpoint
        self._beginning: Beginning  # of the part that trains
        self.sinks = []
        stack.callback(failures.close)
        stack.enter_context(self.screen.live())
        stack.enter_context(self.lag.measuring())

    async def prepare(self, stack: ExitStack) -> None:
        """Make the run directory what it was where the run continues. Call it first."""
        self._beginning = await self._beginnings.first(self._checkpoint, self.screen.say)
        self.trainer = TrainerProcess(
            self._trainer_settings(),
            cores=self._cores.available if self._cores.own else None,
            nodes=self._nodes,
            turn=partial(self._turns.turn, TRAINER),
        )
        if self._checkpoint is not None:
            self._spending_log.go_on(self.ledger.spending())
        stack.callback(self._spending_log.write)  # whatever ends the run

    def open_sinks(self) -> AbstractContextManager[list[MetricSink]]:
        """Open where metrics are sent to, which may take long: W&B asks its server. They are the run's `sinks`."""
        iterations, path = self.plan.schedule.iterations, self.directory.path
        stages, report = lambda: self._results.stages, self._start.report
        return open_sinks(self.config, path, iterations, stages, self.screen.warn, report)

    async def run(self) -> TrainOutcome:
        """Start the servers and the trainer, train, and stop them again."""
        try:
            cluster, path = self.config.cluster, self.directory.path
            if cluster.kind == "ray":
                self.events.publish(StepBegan("waiting for places on Ray"))
            async with (
                alongside(self._watchdog.watch),
                placed(self.plan.served, cluster, path, cluster.placed_nodes) as places,
                placed_nodes(self._nodes, places.nodes, path),
                nullcontext() if self._nodes is None else self._nodes.open(),
                self._open_services(places) as services,
            ):
                self._spending_log.write(iteration=0)  # what was asked during the start
                await self._work(services)
                self._watchdog.on(StepBegan("stopping"))
        except* BudgetSpentError as spent:
            self._results.is_out_of_money(spent)
        return self._results.outcome(
            self.directory.path, self.evaluations.history.best, self._spending.summary(), self._restarts.count
        )

    def _open_services(self, places: RayPlaces) -> AbstractAsyncContextManager[OpenServices]:
        """Open what the plan serves, with the trainer and the verifier beside it."""
        return open_services(
            places.served,
            self.directory.path,
            run=(self.config, self.plan),
            beside=Companions(
                entered=[self.trainer, self.verifier, *dict.fromkeys(self.environments.values())],
                watches=places.watches,
                spending=self._spending,
                cores=self._cores,
                turns=self._turns,
                listener=StartListener(
                    starting=self._servers_starting,
                    step=lambda step: self.events.publish(StepBegan(step)),
                    answered=self._watchdog.answered,
                    warn=self.screen.warn,
                    ready=self.screen.say,
                    waiting=self.screen.say,
                ),
            ),
        )

    def _servers_starting(self, backends: Mapping[str, Backend]) -> None:
        self.events.publish(ServersStarting(partial(replica_lines, backends)))
        for line in taking_turns(self._order):
            self.screen.say(line)
        logs = self.directory.path / "logs"
        self.events.publish(StepBegan(f"starting {', '.join(self.plan.served)} and trainer; their logs: {logs}"))

    async def _work(self, services: OpenServices) -> None:
        """Evaluate, train, and evaluate again, while the servers live."""
        self.services = services
        self._note_cpu()
        compared = precision(self.config.training.dtype, services.capabilities["student"].dtype)
        self._warn_once(MISMATCHED, lambda finished: mismatch_words(finished.report.metrics, compared))
        rows = await self._rows()
        self._warn_once(NO_ADVICE, OutcomeHistory(rows).warning)
        if self.environments:
            self._warn_once(NO_TURNS, lambda finished: unplayed_words(finished.means))
        baseline = getattr(self.config.policy, "baseline", None)
        if isinstance(baseline, float) and baseline > 0:
            self._warn_once(FELL, EntropyHistory(rows, baseline).warning)
        before = self._results.before = await self.evaluations.before(services.student)
        if self._beginning.checkpoint is not None:
            await self._tell_sinks()
        elif before is not None:
            for sink in self.sinks:
                sink.write(0, evaluation_metrics(before), sample_texts(before))
        state = await self._train()
        if not state.stopped:
            after = self._results.after = await self.evaluations.after(services.student, state.iteration)
            if after is not None and state.iteration not in self.evaluations.told():
                for sink in self.sinks:
                    sink.conclude(state.iteration, evaluation_metrics(after), sample_texts(after))
        if self._nodes is not None:
            self._nodes.ends("stopped" if state.stopped else "done")

    def _note_cpu(self) -> None:
        """Write down what the trainer computes on. Say so if an earlier part of the run computed on another CPU."""
        now = self.trainer.cpu
        before = self.directory.note_cpu(now) if now else None
        if before is not None and before != now:
            words = f"trained on {before} so far, and now on {now}: from here on the numbers differ in their last bits"
            self.screen.warn(words)
            structlog.get_logger().warning("other cpu", reason=words)

    async def _train(self) -> OrchestratorState:
        """Train one part after the other, and return where the last one ended."""
        with trace_to(self.directory.path / "trace.json") if self.config.run.trace else nullcontext() as trace:
            while True:
                part = Part(self, self._beginning)
                self._results.orchestrator = part.orchestrator
                if trace is not None:
                    trace(part.orchestrator)
                # The first trainer was started beside the servers.
                loss = await part.train(self._start.stop, starts_trainer=self._restarts.count > 0)
                if loss is None:
                    return part.orchestrator.state
                self._restarts.after(loss, part.orchestrator.trained.step)
                self.begin("restarting the trainer")
                await self.trainer.stop()
                for servers in (self.services.student, *self.services.following(self.config).values()):
                    if isinstance(servers, ReplicaPool):
                        servers.withdraw_weights()
                self._beginning = await self._beginnings.after(loss, self._beginning)
                self.trainer.settings = self._trainer_settings()
                step, restart = self._beginning.manifest.step, self._restarts
                self.screen.warn(
                    f"{loss}; continuing after iteration {step} (restart {restart.count} of {restart.most})"
                )
                await self._tell_sinks()

    def _trainer_settings(self) -> TrainerSettings:
        return trainer_settings(self.config, self.plan, self.directory, self._beginning)

    def _warn_once(self, event: str, words: Callable[[IterationFinished], str]) -> None:
        self.events.subscribe(IterationWarning(event, words, self.screen.warn), to=IterationFinished)

    async def _tell_sinks(self) -> None:
        """Tell the sinks which iterations are still true, beginning with the evaluation before training."""
        before = evaluation_metrics(self._results.before)
        rows = [*([{"iteration": 0.0, **before}] if before else []), *await self._rows()]
        for sink in self.sinks:
            sink.go_back(rows)

    async def _rows(self) -> list[dict[str, float]]:
        """Return the metrics of the iterations so far."""
        return await in_thread(lambda: RunFiles(self.directory.path).metrics())
