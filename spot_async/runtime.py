"""Puts a run together and takes it apart: processes, backends, stages, orchestrator, evaluation, files.

Whatever ends a run (its last iteration, a dead server, Ctrl-C), all children are gone when this
returns, and the run directory is complete up to the last finished iteration.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import structlog
from rich.console import Console

from spot_async import registry
from spot_async.concurrency import gather
from spot_async.config import Config, ModelConfig
from spot_async.evaluation.runner import EvaluationResult, evaluate
from spot_async.ledger import PromptState
from spot_async.orchestrator import IterationResult, Orchestrator, OrchestratorSettings
from spot_async.preflight import ModelFiles, TrainPlan, check_capabilities
from spot_async.prompts import PromptSource
from spot_async.protocols import Backend, CandidateScorer, Generator, Scorer, Verifier, WeightSink
from spot_async.run_directory import RunDirectory
from spot_async.stages import Services, Stages
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.run_log import RunLog, log_events_to
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Capabilities, Prompt

T = TypeVar("T")

CAPABILITIES_TIMEOUT_S = 60.0
WEIGHT_UPDATE_TIMEOUT_S = 600.0


class StudentBackend(Backend, Generator, CandidateScorer, WeightSink, Protocol):
    """What the student's backend must be."""


class TeacherBackend(Backend, Scorer, Protocol):
    """What the teacher's backend must be."""


@dataclass(frozen=True)
class TrainOutcome:
    """What a finished run amounts to."""

    iterations: int
    before: EvaluationResult | None
    after: EvaluationResult | None
    prompts: dict[str, int]  # how many ended in which state


class Observers:
    """Passes each event to the files first, then to the screen."""

    def __init__(self, log: RunLog, console: RunConsole) -> None:
        self._observers = (log, console)

    def iteration_finished(self, result: IterationResult) -> None:
        for observer in self._observers:
            observer.iteration_finished(result)

    def prompt_died(self, prompt: Prompt, reason: str) -> None:
        for observer in self._observers:
            observer.prompt_died(prompt, reason)


async def train(config: Config, plan: TrainPlan, directory: RunDirectory, console: Console) -> TrainOutcome:
    """One training run, evaluated before and after where the configuration says so."""
    log_events_to(directory.path / "logs" / "run.jsonl")
    screen = RunConsole(console, plan.schedule.iterations)
    student = cast(StudentBackend, make_backend(config.student, "student", directory))
    teacher = cast(TeacherBackend, make_backend(config.teacher, "teacher", directory))
    trainer = TrainerProcess(trainer_settings(config, plan, directory))
    verifier: Verifier = registry.load("verifiers", config.verifier.kind)(config.verifier)

    async with AsyncExitStack() as stack:
        stack.enter_context(screen.live())
        screen.phase("starting student, teacher and trainer")
        # Whatever starts last decides when it begins, so all start at once.
        await gather(_enter(stack, each) for each in (student, teacher, trainer, verifier))
        gc.freeze()  # or each full collection walks the libraries' objects, as often as a run makes its own

        async def run() -> TrainOutcome:
            found_student, found_teacher = await gather([_capabilities(student), _capabilities(teacher)])
            check_capabilities(config, plan.policy.needs, found_student, found_teacher)
            before = await measure(config, plan.evaluation, plan.student, student, directory, screen, "before")
            orchestrator = make_orchestrator(config, plan, directory, screen, student, teacher, trainer, verifier)
            screen.phase(f"training with {config.policy.kind}", orchestrator)
            await orchestrator.run()
            after = await measure(config, plan.evaluation, plan.student, student, directory, screen, "after")
            ledger = orchestrator.state.ledger
            prompts = {state.value: ledger.count(state) for state in PromptState if ledger.count(state)}
            return TrainOutcome(orchestrator.state.iteration, before, after, prompts)

        outcome = await watched(run(), [student.watch, teacher.watch, trainer.watch])
        structlog.get_logger().info("finished", process="orchestrator", cpu_s=time.process_time())
    directory.write_summary(summarize(config, plan, outcome))
    return outcome


async def evaluate_student(
    config: Config,
    student_files: ModelFiles,
    sources: Sequence[PromptSource],
    directory: RunDirectory,
    console: Console,
) -> EvaluationResult:
    """Only the student's server and one evaluation."""
    log_events_to(directory.path / "logs" / "run.jsonl")
    screen = RunConsole(console, 0)
    student = cast(StudentBackend, make_backend(config.student, "student", directory))
    async with AsyncExitStack() as stack:
        stack.enter_context(screen.live())
        screen.phase("starting the student")
        await stack.enter_async_context(student)
        result = await watched(measure(config, sources, student_files, student, directory, screen, ""), [student.watch])
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


async def measure(
    config: Config,
    sources: Sequence[PromptSource],
    student_files: ModelFiles,
    generator: Generator,
    directory: RunDirectory,
    screen: RunConsole,
    when: str,
) -> EvaluationResult | None:
    """One evaluation, its responses written; None when the configuration has no evaluation."""
    if config.evaluation is None:
        return None
    screen.phase(f"evaluating {when}".strip())
    settings = config.evaluation.verifier
    async with registry.load("verifiers", settings.kind)(settings) as verifier:
        result = await evaluate(
            sources,
            config.evaluation,
            generator=generator,
            verifier=verifier,
            vocabulary=student_files.vocabulary,
            on_progress=screen.progress,
        )
    name = f"evaluation-{when}.jsonl" if when else "evaluation.jsonl"
    directory.append(name, [response for row in result.responses for response in row])
    structlog.get_logger().info("evaluated", when=when, avg=result.figures("all").avg, tokens=result.tokens)
    return result


def make_backend(config: ModelConfig, role: str, directory: RunDirectory) -> Backend:
    backend: Backend = registry.load("backends", config.backend.kind)(
        config.backend, role=role, model=config.model, run_directory=directory.path
    )
    return backend


def make_orchestrator(
    config: Config,
    plan: TrainPlan,
    directory: RunDirectory,
    screen: RunConsole,
    student: StudentBackend,
    teacher: TeacherBackend,
    trainer: TrainerProcess,
    verifier: Verifier,
) -> Orchestrator:
    stages = Stages(
        Services(generator=student, scorer=teacher, candidate_scorer=student, verifier=verifier),
        config.stages,
        config.sampling,
        student=plan.student.vocabulary,
        teacher=plan.teacher.vocabulary,
        run_seed=config.run.seed,
        max_running_prompts=config.queue_capacity_prompts,
        max_probes_per_prompt=plan.policy.needs.probes_per_prompt,
    )
    return Orchestrator(
        OrchestratorSettings(
            iterations=plan.schedule.iterations,
            batch_size=config.training.batch_size,
            max_staleness=config.max_staleness,
            capacity_prompts=config.queue_capacity_prompts,
            capacity_bytes=config.queue.capacity_bytes,
            max_response_tokens=config.sampling.max_response_tokens,
            weight_update_timeout_s=WEIGHT_UPDATE_TIMEOUT_S,
        ),
        prompts=plan.schedule,
        policy=plan.policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=[student],
        observer=Observers(RunLog(directory, stages.all), screen),
    )


def trainer_settings(config: Config, plan: TrainPlan, directory: RunDirectory) -> TrainerSettings:
    return TrainerSettings(
        training=config.training,
        model_directory=str(Path(config.student.model).resolve()),
        run_directory=str(directory.path),
        temperature=config.sampling.temperature,
        seed=config.run.seed,
        iterations=plan.schedule.iterations,
    )


def summarize(config: Config, plan: TrainPlan, outcome: TrainOutcome) -> dict[str, Any]:
    """The contents of `summary.json`."""
    return {
        "policy": config.policy.kind,
        "iterations": outcome.iterations,
        "prompts": outcome.prompts | {"filtered": plan.filtered},
        "before": evaluation_summary(outcome.before),
        "after": evaluation_summary(outcome.after),
    }


def evaluation_summary(result: EvaluationResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    tiers = [result.figures(tier) for tier in result.tier_names()]
    return {
        "samples": result.samples,
        "tokens": result.tokens,
        "tiers": {
            f.tier: {
                "problems": f.problems,
                "avg": f.avg,
                "avg_standard_error": f.avg_error,
                "pass": f.pass_,
                "pass_standard_error": f.pass_error,
            }
            for f in tiers
        },
    }


async def _enter(stack: AsyncExitStack, resource: Any) -> None:
    await stack.enter_async_context(resource)


async def _capabilities(backend: Backend) -> Capabilities:
    deadline = asyncio.get_running_loop().time() + CAPABILITIES_TIMEOUT_S
    return await backend.capabilities(deadline=deadline)
