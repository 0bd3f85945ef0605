"""Puts a run together and takes it apart: processes, backends, stages, orchestrator, evaluation, files.

Whatever ends a run (its last iteration, a dead server, Ctrl-C), all children are gone when this
returns, and the run directory is complete up to the last finished iteration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from rich.console import Console

from spot_async import registry
from spot_async.concurrency import alongside, gather
from spot_async.config import Config, ModelConfig
from spot_async.diagnosis import Diagnosis, capabilities, compare_students, diagnose
from spot_async.errors import BudgetSpentError, RequestError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.measuring import measure, write_evaluation
from spot_async.evaluation.results import EvaluationResult
from spot_async.initial_weights import send_initial_weights
from spot_async.ledger import PromptState
from spot_async.model_files import ModelFiles
from spot_async.monitoring import Phases, make_live_verdict
from spot_async.orchestrator import (
    WEIGHT_UPDATE_TIMEOUT_S,
    IterationResult,
    LiveEvaluation,
    Orchestrator,
    OrchestratorSettings,
    RunObserver,
)
from spot_async.preflight import TrainPlan, sleeps_while_training
from spot_async.protocols import Backend, CandidateScorer, Generator, Scorer, Sleeper, Trainer, Verifier, WeightSink
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory import RunDirectory
from spot_async.servers import backend_factories
from spot_async.spending.account import Account
from spot_async.spending.records import SpendingLog
from spot_async.spending.run_spending import RunSpending
from spot_async.stages import Services, Stages
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.evaluation_history import BestCheckpoint, EvaluationHistory
from spot_async.telemetry.live_verdict import replica_lines
from spot_async.telemetry.loop_lag import LoopLag
from spot_async.telemetry.run_log import RunLog, log_events_to
from spot_async.telemetry.sinks import open_sinks
from spot_async.telemetry.trace import trace_to
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import PolicyNeeds, Prompt
from spot_async.vocabulary import Vocabulary
from spot_async.watchdog.limits import silence_limits
from spot_async.watchdog.monitor import Watchdog

T = TypeVar("T")


class StudentBackend(Backend, Generator, CandidateScorer, WeightSink, Protocol):
    """What the student's backend must be."""


class TeacherBackend(Backend, Scorer, Generator, Protocol):
    """What the teacher's backend must be, as far as the policy's needs go."""


class ReferenceBackend(Backend, Scorer, Protocol):
    """What the frozen reference's backend must be."""


@dataclass(frozen=True)
class Backends:
    """The inference services of a training run, by role; None where the policy asks for none."""

    student: StudentBackend | ReplicaPool[StudentBackend]
    teacher: TeacherBackend | ReplicaPool[TeacherBackend] | None
    reference: ReferenceBackend | ReplicaPool[ReferenceBackend] | None

    def by_role(self) -> dict[str, Backend]:
        return {role: backend for role, backend in vars(self).items() if backend is not None}

    def pools(self) -> dict[str, ReplicaPool[Any]]:
        return {role: each for role, each in self.by_role().items() if isinstance(each, ReplicaPool)}


@dataclass(frozen=True)
class TrainOutcome:
    """What a finished run amounts to."""

    directory: Path  # of the run
    iterations: int
    before: EvaluationResult | None
    after: EvaluationResult | None
    best: BestCheckpoint | None  # None without evaluations during the run
    prompts: dict[str, int]  # how many ended in which state
    spent: BudgetSpentError | None = None  # why it ended early, with everything saved
    spending: Mapping[str, Any] = field(default_factory=dict)  # what its endpoints were asked, and what that cost

    @property
    def student(self) -> Path:
        """The trained student, a Hugging Face directory. Missing when not one iteration was finished."""
        return self.directory / "student"


class Observers:
    """Passes each event on, in the order given: the files first, then the screen."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def iteration_finished(self, result: IterationResult) -> None:
        for observer in self._observers:
            observer.iteration_finished(result)

    def prompt_died(self, prompt: Prompt, error: RequestError) -> None:
        for observer in self._observers:
            observer.prompt_died(prompt, error)


async def train(
    config: Config,
    plan: TrainPlan,
    directory: RunDirectory,
    console: Console,
    *,
    exit_process: Callable[[str], None] | None = None,
) -> TrainOutcome:
    """One training run, evaluated before and after where the configuration says so.

    `exit_process`: see `Watchdog`.
    """
    screen = RunConsole(console, plan.schedule.iterations)
    spending = RunSpending(config, plan)
    ledger_file = SpendingLog(directory, spending.accounts)
    backends = make_backends(config, plan, directory, spending)
    replicas = partial(replica_lines, backends.by_role())
    screen.replicas = replicas
    watchdog = Watchdog(plan.silence, directory.path, exit_process=exit_process, replicas=replicas)
    lag = LoopLag()
    student = backends.student
    trainer = TrainerProcess(trainer_settings(config, plan, directory))
    verifier: Verifier = registry.load("verifiers", config.verifier.kind)(config.verifier)
    stages = make_stages(config, plan, backends, verifier)
    stages.teacher_cache = spending.teacher_cache
    history = EvaluationHistory(directory, config.evaluation.best_by if config.evaluation else "avg")

    with ExitStack() as stack:
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        stack.callback(ledger_file.write)  # whatever ends the run
        sinks = stack.enter_context(open_sinks(config, directory.path, stages.all))
        stack.enter_context(screen.live())
        stack.enter_context(watchdog)
        stack.enter_context(lag.measuring())
        phases = Phases(screen, watchdog)
        phases.begin(f"starting {', '.join(backends.pools())} and trainer")

        async def run() -> TrainOutcome:
            phases.begin("checking the servers")
            diagnosis = await diagnose_servers(config, plan, backends)
            diagnosis.raise_if_unsafe()
            for warning in diagnosis.warnings:
                screen.warn(warning)
            stages.capabilities = diagnosis.capabilities
            await spending.teacher_asked(diagnosis.capabilities)
            ledger_file.write(iteration=0)
            await send_initial_weights(config.student, student, stages.capabilities["student"], phases.begin)
            student_offers = await compare_students(plan, student, diagnosis.capabilities["student"], screen.warn)
            stages.capabilities = {**diagnosis.capabilities, "student": student_offers}
            vocabulary = Vocabulary(plan.student.vocabulary.tokenizer, plan.stop_token_ids)

            async def evaluated(when: str, weights: Path) -> EvaluationResult | None:
                return await measure(config, plan.evaluation, vocabulary, student, directory, phases, when, weights)

            async def evaluate_live(iteration: int) -> EvaluationResult | None:
                if not evaluation_is_due(config, iteration):
                    return None
                result = await evaluated(f"{iteration:06d}", directory.weights_after(iteration))
                phases.begin(f"training with {config.policy.kind}", orchestrator)
                return result

            before = await evaluated("before", plan.student.directory)
            log = RunLog(
                directory,
                stages,
                sinks,
                samples_every=config.run.samples_every,
                backends=backends.by_role(),
                loop_lag=lag,
                spending=spending.metrics(),
            )
            observer = Observers(log, ledger_file, history, screen)
            orchestrator = make_orchestrator(config, plan, stages, trainer, [student], observer, evaluate_live)
            orchestrator.report_to(watchdog)
            phases.begin(f"training with {config.policy.kind}", orchestrator)
            verdicts = make_live_verdict(config, orchestrator, backends.by_role(), screen)
            trace = trace_to(directory.path / "trace.json", orchestrator) if config.run.trace else nullcontext()
            with trace:
                async with alongside(verdicts.speak):
                    await orchestrator.run()
            iterations, ledger = orchestrator.state.iteration, orchestrator.state.ledger
            after, last = history.result_after(iterations), directory.weights_after(iterations)
            if after is not None:  # the same weights, problems and seeds: asking again would give it again
                write_evaluation(config, plan.evaluation, directory, "after", last, after)
            else:
                after = await evaluated("after", last if iterations else plan.student.directory)
                if after is not None and history.best is not None:
                    history.add(iterations, after, (directory.path / "student").resolve())
            prompts = {state.value: ledger.count(state) for state in PromptState if ledger.count(state)}
            return TrainOutcome(
                directory.path,
                iterations,
                before,
                after,
                history.best,
                prompts,
                spent=orchestrator.state.spent,
                spending=spending.summary(),
            )

        servers = list(backends.by_role().values())
        async with alongside(watchdog.watch), running(*spending.resources, *servers, trainer, verifier):
            outcome = await watched(run(), [*(each.watch for each in servers), trainer.watch])
            watchdog.phase_began("stopping")
        structlog.get_logger().info("finished", process="orchestrator", cpu_s=time.process_time())
    directory.write_summary(summarize(config, plan, outcome))
    return outcome


async def evaluate_student(
    config: Config,
    student_files: ModelFiles,
    benchmarks: Sequence[Benchmark],
    directory: RunDirectory,
    console: Console,
    *,
    exit_process: Callable[[str], None] | None = None,
) -> EvaluationResult:
    """Only the student's server and one evaluation, continued where there is one. `exit_process`: see `Watchdog`."""
    screen = RunConsole(console, 0)
    watchdog = Watchdog(silence_limits(config, PolicyNeeds()), directory.path, exit_process=exit_process)
    account = config.student.backend.open_account("student")
    student: ReplicaPool[StudentBackend] = make_pool(config.student, "student", directory, account)
    with log_events_to(directory.path / "logs" / "run.jsonl"), screen.live(), watchdog:
        phases = Phases(screen, watchdog)
        phases.begin("starting the student")

        async def run() -> EvaluationResult | None:
            await send_initial_weights(config.student, student, await capabilities(student), phases.begin)
            vocabulary, weights = student_files.vocabulary, student_files.directory
            return await measure(config, benchmarks, vocabulary, student, directory, phases, "", weights)

        async with alongside(watchdog.watch), running(student):
            result = await watched(run(), [student.watch])
            watchdog.phase_began("stopping")
    assert result is not None
    directory.write_summary({"evaluation": evaluation_summary(result)})
    return result


async def watched(run: Coroutine[Any, Any, T], watches: list[Callable[[], Awaitable[None]]]) -> T:
    """Run while children live; the first that dies by itself cancels everything with its `ProcessDiedError`."""
    async with asyncio.TaskGroup() as group:

        async def watch(each: Callable[[], Awaitable[None]]) -> None:
            await each()

        watching = [group.create_task(watch(each), name="watch") for each in watches]
        result = await run
        for task in watching:
            task.cancel()
    return result


def evaluation_is_due(config: Config, iteration: int) -> bool:
    """Whether the weights of this iteration (the first one is 1) are evaluated during training."""
    every = config.evaluation.eval_every if config.evaluation is not None else 0
    return every > 0 and iteration % every == 0


async def diagnose_servers(config: Config, plan: TrainPlan, backends: Backends) -> Diagnosis:
    """Ask servers that were entered. One that ends of a question is not started again: it says what is wrong."""
    pools = backends.pools().values()
    watches = [server.watch for pool in pools for server in pool.backends.values()]
    return await watched(diagnose(config, plan, backends.by_role()), watches)


def make_pool(
    model: ModelConfig, role: str, directory: RunDirectory, account: Account | None = None
) -> ReplicaPool[Any]:
    """All servers of a role, not yet started. What is asked of them is charged to the `account`."""
    places = [each.place for each in model.backend.servers()]
    return ReplicaPool(
        role,
        backend_factories(model, role, directory.path, account),
        model.serving,
        are_ours=not any(place is not None and place.is_attached for place in places),
        rate_limit=account.rate_limit if account is not None and account.is_limited else None,
    )


def make_backends(
    config: Config, plan: TrainPlan, directory: RunDirectory, spending: RunSpending | None = None
) -> Backends:
    """What the plan says must be served, not yet started. What is asked of it is charged to `spending`."""
    spending = spending or RunSpending(config, plan)

    def make(role: str, model: ModelConfig | None, needed: bool) -> Any:
        if not needed or model is None:
            return None
        if role == "teacher" and spending.replayed_teacher is not None:
            return spending.replayed_teacher
        return make_pool(model, role, directory, spending.accounts.get(role))

    return Backends(
        student=make("student", config.student, True),
        teacher=make("teacher", config.teacher, plan.policy.needs.teacher),
        reference=make("reference", plan.reference, True),
    )


def make_stages(config: Config, plan: TrainPlan, backends: Backends, verifier: Verifier) -> Stages:
    student, teacher, needs = backends.student, backends.teacher, plan.policy.needs
    return Stages(
        Services(
            generator=student,
            scorer=teacher,
            candidate_scorer=student,
            verifier=verifier,
            teacher_generator=teacher if needs.teacher_responses else None,
            reference=backends.reference,
        ),
        config.stages,
        config.sampling,
        student=plan.student.vocabulary,
        teacher=(plan.teacher or plan.student).vocabulary,
        run_seed=config.run.seed,
        max_running_prompts=config.queue_capacity_prompts,
        max_probes_per_prompt=needs.probes_per_prompt,
        max_samples_per_prompt=needs.samples_per_prompt,
    )


def make_orchestrator(
    config: Config,
    plan: TrainPlan,
    stages: Stages,
    trainer: Trainer,
    weight_sinks: Sequence[WeightSink],
    observer: RunObserver,
    evaluate: LiveEvaluation,
) -> Orchestrator:
    return Orchestrator(
        OrchestratorSettings(
            iterations=plan.schedule.iterations,
            batch_size=config.training.batch_size,
            max_staleness=config.max_staleness,
            capacity_prompts=config.queue_capacity_prompts,
            capacity_bytes=config.queue.capacity_bytes,
            max_response_tokens=config.sampling.max_response_tokens,
            vocab_size=plan.student.vocab_size,
            weight_update_timeout_s=WEIGHT_UPDATE_TIMEOUT_S,
            max_dead_share=config.run.max_dead_share,
        ),
        prompts=plan.schedule,
        policy=plan.policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=weight_sinks,
        observer=observer,
        evaluate=evaluate,
        sleepers=[each for each in weight_sinks if isinstance(each, Sleeper) and each.sleeps_while_training],
    )


def trainer_settings(config: Config, plan: TrainPlan, directory: RunDirectory) -> TrainerSettings:
    return TrainerSettings(
        training=config.training,
        model_directory=str(Path(config.student.model).resolve()),
        run_directory=str(directory.path),
        temperature=config.sampling.temperature,
        seed=config.run.seed,
        iterations=plan.schedule.iterations,
        end_token_ids=plan.stop_token_ids,
        shares_devices=sleeps_while_training(config.student),
    )


def summarize(config: Config, plan: TrainPlan, outcome: TrainOutcome) -> dict[str, Any]:
    """The contents of `summary.json`."""
    return {
        "policy": config.policy.kind,
        "iterations": outcome.iterations,
        "prompts": outcome.prompts | {"filtered": plan.filtered},
        "problems": {
            "usable": plan.problems - plan.filtered,
            "rows": dict(plan.rows),
            "left_over_per_epoch": plan.schedule.left_over_per_epoch,  # by its last incomplete batch
        },
        "before": evaluation_summary(outcome.before),
        "after": evaluation_summary(outcome.after),
        "best": best_summary(outcome.best),
        **outcome.spending,
        **({} if outcome.spent is None else {"ended_early": str(outcome.spent)}),
    }


def best_summary(best: BestCheckpoint | None) -> dict[str, Any] | None:
    if best is None:
        return None
    return asdict(best) | {"optimistic": "picked by the problems it is measured on"}


def evaluation_summary(result: EvaluationResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    rows = {name: result.figures(name) for name in result.row_names()}
    return {
        "samples": max(benchmark.samples for benchmark in result.benchmarks),
        "tokens": result.tokens,
        "tiers": {
            name: {
                "problems": figures.problems,
                "avg": figures.avg.value,
                "avg_standard_error": figures.avg.standard_error,
                "pass": figures.pass_at[figures.samples].value,
                "pass_standard_error": figures.pass_at[figures.samples].standard_error,
            }
            for name, figures in rows.items()
            if figures.avg is not None
        },
    }


@asynccontextmanager
async def running(*resources: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """All of them entered at once and left at once; what entered is left whatever happens to the others."""
    entered: list[AbstractAsyncContextManager[Any]] = []

    async def enter(resource: AbstractAsyncContextManager[Any]) -> None:
        await resource.__aenter__()
        entered.append(resource)

    async def leave(resource: AbstractAsyncContextManager[Any]) -> None:
        await resource.__aexit__(None, None, None)

    try:
        await gather(enter(resource) for resource in resources)
        yield
    finally:
        await gather(leave(resource) for resource in entered)
