"""One part of a training run: its orchestrator, its log and its checkpoints, until it is done or its trainer is lost.

The first part begins where the command does, each other one where a trainer was lost. The servers outlive all parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from spot_async.base.events import Channel
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.tasks import alongside, in_thread
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.errors import TrainerLostError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated, RunEvent, StepBegan
from spot_async.loop.orchestrator import Orchestrator
from spot_async.loop.publishing import LiveEvaluation, LiveStudent
from spot_async.loop.resuming import Records, StopRequest
from spot_async.protocols import Verifier, WeightSink
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.running.assembly import RunEnvironment, make_stages, orchestrator_settings
from spot_async.running.checkpoints import RunCheckpoints
from spot_async.running.resuming import Beginning
from spot_async.running.run_evaluations import RunEvaluations
from spot_async.running.run_trainer import loss_of_trainer
from spot_async.running.services import SENDING_WEIGHTS, OpenServices, initial_weights
from spot_async.stages.plugin_contract import state_of
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.live_bottleneck import LiveBottleneck
from spot_async.telemetry.meters import LoopLag, RunMeters, replica_states
from spot_async.telemetry.run_log import RunLog
from spot_async.telemetry.side_sink import MetricSink
from spot_async.trainer.handle import TrainerProcess
from spot_async.types import WeightSnapshot, WeightVersion


class OpenRun:
    """What all parts of a run share: its files are open, and its servers have answered. `TrainingRun` is one."""

    config: Config
    plan: TrainPlan
    directory: RunDirectory
    events: Channel
    screen: RunConsole
    ledger: Ledger
    evaluations: RunEvaluations
    trainer: TrainerProcess
    verifier: Verifier
    environments: Mapping[str, RunEnvironment]
    services: OpenServices
    sinks: Sequence[MetricSink]
    lag: LoopLag

    def begin(self, step: str, part: Part | None = None) -> None:
        self.events.publish(StepBegan(step, None if part is None else part.orchestrator))


class Part:
    """A part of a run that has not begun. `orchestrator` says how far it is."""

    def __init__(self, run: OpenRun, beginning: Beginning) -> None:
        """Make its orchestrator, with its stages and the log that follows it.

        They have a channel of their own, since what listens to one part must not hear the next.
        """
        config, parameters = run.config, run.plan.parameters
        self._run = run
        self._began = beginning.manifest
        events = Channel()
        events.subscribe(run.events)
        stages = make_stages(config, run.plan, run.services, run.verifier, run.environments, events=events)
        log = RunLog(
            run.directory,
            stages,
            run.sinks,
            RunMeters(run.services.backends, run.lag, run.services.spending.metrics()),
            is_strict=config.max_staleness == 0,
            samples_every=config.run.samples_every,
            evaluations=run.evaluations.untold(self._began.lineage),
        )
        events.subscribe(log, to=RunEvent)
        checkpoints = RunCheckpoints(
            run.directory,
            config.training,
            iterations=run.plan.schedule.iterations,
            beginning=self._began,
            ledger=run.ledger,
            expected_bytes=parameters.checkpoint_bytes(config.copies) if parameters is not None else 0,
            policy_state=partial(state_of, run.plan.policy),
        )
        records = Records(run.ledger, checkpoints if config.training.checkpoint_every else None, beginning.resumption)
        evaluation = LiveEvaluation(run.evaluations.is_due, self._evaluate_live, run.evaluations.figures)
        services = run.services
        self.orchestrator = Orchestrator(
            orchestrator_settings(config, run.plan),
            prompts=run.plan.schedule,
            policy=run.plan.policy,
            stages=stages,
            trainer=run.trainer,
            student=LiveStudent([services.student], services.sleepers, evaluation, services.following(config)),
            records=records,
        )

    async def train(self, stop: StopRequest, *, starts_trainer: bool) -> TrainerLostError | None:
        """Train it. Return the loss of its trainer, if that is what ended it early."""
        run, orchestrator = self._run, self.orchestrator
        try:
            if starts_trainer:
                await run.trainer.start()
            if self._began.lineage:
                await self._catch_up()
            run.begin(f"training with {run.config.policy.kind}", self)
            bottlenecks = LiveBottleneck(
                orchestrator,
                run.screen.say,
                run.config.model_dump(),
                every_s=run.config.run.verdict_every_s,
                cores=run.directory.cores,
                replicas=partial(replica_states, run.services.backends),
            )
            with stop.heard_by(orchestrator.stop) if run.config.training.checkpoint_every else nullcontext():
                async with alongside(run.trainer.watch, bottlenecks.speak):
                    await orchestrator.run()
        except (TrainerLostError, BaseExceptionGroup) as failures:
            loss = loss_of_trainer(failures)
            task = asyncio.current_task()
            if loss is None or (task is not None and task.cancelling()):
                raise
            if not orchestrator.state.stopped:
                return loss
            run.screen.warn(f"{loss}: what it did since the newest checkpoint is not saved")
        return None

    async def _catch_up(self) -> None:
        """Bring the student's servers, which have other weights, to those that the part begins with.

        Evaluations that were due before, and are not complete, are made on the way.
        """
        run, step, loop = self._run, self._began.step, asyncio.get_running_loop()
        await self._teachers_catch_up()
        if step == 0:
            await self._send(initial_weights(run.config.student, self._began.lineage))
            return
        await in_thread(run.directory.weights.keep, step)
        for iteration in range(1, step + 1):
            is_missing = run.evaluations.is_missing(iteration)
            if not is_missing and iteration < step:
                continue
            weights = str(run.directory.weights.after(iteration))
            snapshot = WeightSnapshot(directory=weights, version=WeightVersion(self._began.lineage, iteration))
            await self._send(snapshot)
            if is_missing:
                began_s = loop.time()
                result = await run.evaluations.of(run.services.student, iteration)
                if result is not None:
                    evaluated = Evaluated(iteration, result, snapshot, loop.time() - began_s)
                    self.orchestrator.stages.events.publish(evaluated)

    async def _teachers_catch_up(self) -> None:
        """Bring teachers that follow the student to what they have beside the weights that the part begins with."""
        run, lineage = self._run, self._began.lineage
        for role, servers in run.services.following(run.config).items():
            follows = run.config.following[role]
            snapshot = initial_weights(run.config.teachers_by_role[role], lineage)
            if had := follows.step_at(self._began.step):
                weights = run.directory.weights.after(had, None if follows.is_live else role)
                snapshot = WeightSnapshot(directory=str(weights), version=WeightVersion(lineage, had))
            await self._send(snapshot, servers)

    async def _send(self, snapshot: WeightSnapshot, servers: WeightSink | None = None) -> None:
        self._run.begin(SENDING_WEIGHTS)
        deadline = asyncio.get_running_loop().time() + WEIGHT_UPDATE_TIMEOUT_S
        await (servers or self._run.services.student).update_weights(snapshot, deadline=deadline)

    async def _evaluate_live(self, iteration: int) -> EvaluationResult | None:
        """Return the evaluation of the weights that are served: what a `LiveEvaluation` measures."""
        run = self._run
        beside = self.orchestrator if run.config.max_staleness > 0 else None
        result = await run.evaluations.of(run.services.student, iteration, beside)
        if iteration < run.plan.schedule.iterations:  # otherwise training is over
            run.begin(f"training with {run.config.policy.kind}", self)
        return result
