"""An evaluation by itself: one student's servers, all benchmarks, and the figures. A training run makes its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.text import Text

from spot_async.base.concurrency import alongside, budget_error, running, watched
from spot_async.base.processes.cores import confined
from spot_async.checks.diagnosis import capabilities, evaluation_warnings
from spot_async.config import Config
from spot_async.errors import BudgetSpentError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.results import EvaluationResult
from spot_async.models.files import ModelFiles
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.assembly import StudentBackend, make_pool
from spot_async.running.initial_weights import send_initial_weights
from spot_async.running.measuring import measure
from spot_async.running.monitoring import Phases
from spot_async.running.servers import core_shares
from spot_async.running.summary import evaluation_summary
from spot_async.spending.records import spending_words, summarize_spending
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.run_log import log_events_to
from spot_async.telemetry.spending_log import SpendingLog
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
    """Only the student's server and one evaluation, continued where there is one. `exit_process`: see `Watchdog`.

    Raises `BudgetSpentError` once the endpoint's budget is spent, with all responses until then kept.
    """
    screen = RunConsole(console, 0)
    watchdog = Watchdog(silence_limits(config, PolicyNeeds()), directory.path, exit_process=exit_process)
    account = config.student.backend.open_account("student")
    accounts = {} if account is None else {"student": account}
    spending = SpendingLog(directory, accounts)
    spending.go_on()
    cores = core_shares({"student": config.student})
    student: ReplicaPool[StudentBackend] = make_pool(config.student, "student", directory, account, cores)
    student.wait_for_servers(screen.say)
    student.tell_of_limits(screen.warn)
    result: EvaluationResult | None = None
    spent: BudgetSpentError | None = None
    with ExitStack() as stack:
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        stack.callback(spending.write)  # whatever ends it
        stack.enter_context(screen.live())
        stack.enter_context(watchdog)
        stack.enter_context(confined(cores))
        for warning in [*evaluation_warnings(benchmarks, student_files.vocabulary), *cores.warnings]:
            screen.warn(warning)
        phases = Phases(screen, watchdog, spending.response_judged)
        phases.begin("starting the student")

        async def run() -> EvaluationResult | None:
            await send_initial_weights(config.student, student, await capabilities(student), phases.begin)
            spending.write(0)  # what the start asked
            vocabulary, weights = student_files.vocabulary, student_files.directory
            return await measure(config, benchmarks, vocabulary, student, directory, phases, "", weights)

        async with alongside(watchdog.watch), running(student):
            try:
                result = await watched(run(), [student.watch])
            except* BudgetSpentError as errors:
                spent = budget_error(errors)
            watchdog.phase_began("stopping")
    summary = summarize_spending(accounts)
    directory.write_summary(
        {"evaluation": evaluation_summary(result)}
        | ({"spending": summary} if summary else {})
        | ({} if spent is None else {"ended_early": str(spent)})
    )
    for role, each in summary.items():
        console.print(Text(f"{role} spent: {spending_words(each)}"), soft_wrap=True)
    if spent is not None:
        raise spent
    assert result is not None
    return result
