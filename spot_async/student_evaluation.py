"""An evaluation by itself: one student's servers, all benchmarks, and the figures. A training run makes its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from spot_async.assembly import StudentBackend, make_pool
from spot_async.concurrency import alongside, running, watched
from spot_async.config import Config
from spot_async.diagnosis import capabilities
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.measuring import measure
from spot_async.evaluation.results import EvaluationResult
from spot_async.initial_weights import send_initial_weights
from spot_async.model_files import ModelFiles
from spot_async.monitoring import Phases
from spot_async.prompts import DATE_WARNING
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory import RunDirectory
from spot_async.run_summary import evaluation_summary
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.run_log import log_events_to
from spot_async.types import PolicyNeeds
from spot_async.watchdog.limits import silence_limits
from spot_async.watchdog.monitor import Watchdog


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
        if any(benchmark.reads_clock for benchmark in benchmarks):
            screen.warn(DATE_WARNING)
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
