"""Runs an evaluation by itself: one student's servers, all benchmarks, and the figures. It trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.text import Text

from spot_async.base.events import Channel
from spot_async.base.tasks import alongside, budget_error
from spot_async.checks.plan import evaluation_warnings
from spot_async.config import Config
from spot_async.errors import BudgetSpentError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import RunEvent, StepBegan
from spot_async.models.files import ModelFiles
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.measuring import measure
from spot_async.running.services import Companions, StartListener, open_services
from spot_async.running.summary import evaluation_summary
from spot_async.spending.run_spending import RunSpending, spending_words, summarize_spending
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.failures import FailureLog
from spot_async.telemetry.run_log import SpendingLog, log_events_to
from spot_async.types import PolicyNeeds
from spot_async.watchdog.monitor import Watchdog
from spot_async.watchdog.silence import silence_limits


async def evaluate_student(
    config: Config,
    student_files: ModelFiles,
    benchmarks: Sequence[Benchmark],
    directory: RunDirectory,
    console: Console,
    *,
    exit_process: Callable[[str], None] | None = None,
) -> EvaluationResult:
    """Start the student's servers, and return their evaluation. One that was begun is continued.

    `exit_process`: see `Watchdog`. Raise BudgetSpentError once the endpoint's budget is spent; responses until then are
    kept.
    """
    screen = RunConsole(console, 0)
    watchdog = Watchdog(silence_limits(config, PolicyNeeds()), directory.path, exit_process=exit_process)
    served = {"student": config.student}
    spending = RunSpending(served)
    ledger_file = SpendingLog(directory, spending.accounts, trains=False)
    ledger_file.go_on()
    events = Channel()
    failures = FailureLog(screen.say)
    events.subscribe(failures)
    events.subscribe(screen, watchdog, ledger_file, to=RunEvent)
    listener = StartListener(
        starting=lambda backends: events.publish(StepBegan("starting the student")),
        step=lambda name: events.publish(StepBegan(name)),
        warn=screen.warn,
        waiting=screen.say,
    )
    result: EvaluationResult | None = None
    spent: BudgetSpentError | None = None
    with ExitStack() as stack:
        stack.enter_context(watchdog)  # before whatever may hang when it is closed
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        stack.callback(ledger_file.write)  # whatever ends it
        stack.callback(failures.close)
        stack.enter_context(screen.live())
        for warning in evaluation_warnings(benchmarks, student_files.vocabulary):
            screen.warn(warning)
        beside = Companions(spending=spending, listener=listener)
        opening = open_services(served, directory.path, cluster=config.cluster, beside=beside)
        try:
            async with alongside(watchdog.watch), opening as services:
                ledger_file.write(0)  # what was asked during the start
                vocabulary, weights = student_files.vocabulary, student_files.directory
                student = services.student
                result = await measure(config, benchmarks, vocabulary, student, directory, events, "", weights)
                watchdog.on(StepBegan("stopping"))
        except* BudgetSpentError as errors:
            spent = budget_error(errors)
    summary = summarize_spending(spending.accounts)
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
