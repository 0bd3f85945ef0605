"""Makes one evaluation in a run directory: continues it where it was begun, has it judged, and writes its files.

`evaluate_student` makes one by itself: it starts the student's servers for it, and trains nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from rich.console import Console
from rich.text import Text

from spot_async.base import registry
from spot_async.base.events import Channel
from spot_async.base.files import as_json, write_whole
from spot_async.base.tasks import alongside, budget_error, in_thread
from spot_async.checks.plan import evaluation_warnings
from spot_async.config import Config, PluginSettings
from spot_async.config.loading import doubled_backslashes
from spot_async.errors import BudgetSpentError
from spot_async.evaluation.benchmarks import Benchmark, outputs_of
from spot_async.evaluation.metrics import EvaluationFigures, over_all, read_figures
from spot_async.evaluation.response_log import (
    Identity,
    JudgedResponse,
    ResponseKey,
    ResponseLog,
    check_same,
    identity_of,
    read_responses,
    settings_fingerprint,
)
from spot_async.evaluation.results import EvaluationResult
from spot_async.evaluation.runner import ResponseSampler, collected, evaluate, keys_of, saved_benchmarks
from spot_async.loop.events import EvaluationBegan, ResponseJudged, RunEvent, StepBegan, TrainingView
from spot_async.models.files import ModelFiles
from spot_async.models.small_files import CONFIG_FILE, DTYPE_KEYS, read_json
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator, Verifier
from spot_async.replicas.leasing import ServicePool
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.assembly import RunEnvironment
from spot_async.running.services import Companions, StartListener, open_services
from spot_async.running.summary import evaluation_summary
from spot_async.spending.run_spending import RunSpending, spending_words, summarize_spending
from spot_async.stages.services import EnvironmentService
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.failures import FailureLog
from spot_async.telemetry.run_log import SpendingLog, log_events_to
from spot_async.types import PolicyNeeds
from spot_async.watchdog.monitor import Watchdog
from spot_async.watchdog.silence import silence_limits


@dataclass(frozen=True)
class Occasion:
    """Of which weights an evaluation is made, and when in a run."""

    directory: RunDirectory
    weights: Path
    when: str = ""  # part of the files' names; empty for the only evaluation of a run directory
    saved: Mapping[ResponseKey, JudgedResponse] | None = None  # responses to judge again; None: they are sampled
    identity: Identity | None = None  # of `saved`, as they are judged now

    @property
    def stem(self) -> str:
        return file_stem(self.when)


async def measure(
    config: Config,
    benchmarks: Sequence[Benchmark],
    vocabulary: Vocabulary | None,
    generator: Generator | ServicePool[Generator] | None,
    occasion: Occasion,
    events: Channel,
    beside: TrainingView | None = None,
) -> EvaluationResult | None:
    """Evaluate the weights that are served, and write the files; return None if the configuration has no evaluation.

    `beside` is what trains meanwhile. Files that are there, as in a run that was resumed, are read, and nothing is
    asked.
    """
    if config.evaluation is None:
        return None
    when = occasion.when
    begun_s = time.monotonic()
    step = f"evaluating {f'after iteration {int(when)}' if when.isdigit() else when}".strip()
    events.publish(StepBegan(step, beside))
    identity = occasion.identity or identity_of(config, benchmarks, occasion.weights)
    log = ResponseLog(occasion.directory, f"{occasion.stem}.jsonl", identity)
    if (finished := finished_evaluation(config, benchmarks, occasion.directory, when)) is not None:
        return finished
    known = log.open()
    async with AsyncExitStack() as stack:
        sampler = ResponseSampler(
            benchmarks,
            config.evaluation,
            generator=generator,
            verifiers=await open_verifiers({each.name: each.verifier for each in benchmarks}, stack),
            vocabulary=vocabulary,
            environments=await open_environments(benchmarks, vocabulary, stack),
            events=events,
        )
        events.publish(EvaluationBegan(sampler.stages))
        result = await evaluate(
            sampler,
            on_progress=lambda finished, total: events.publish(ResponseJudged(finished, total)),
            known=known,
            keep=log.append,
            saved=occasion.saved,
        )
    await in_thread(write_files, occasion, result, log, benchmarks, seconds=time.monotonic() - begun_s)
    log.discard_partial()
    figures = over_all(result.rows)
    avg = None if figures is None or figures.avg is None else figures.avg.value
    structlog.get_logger().info("evaluated", when=when, avg=avg, tokens=result.tokens, continued_from=len(known))
    return result


def finished_evaluation(
    config: Config, benchmarks: Sequence[Benchmark], directory: RunDirectory, when: str
) -> EvaluationResult | None:
    """Return an evaluation from its files; None if it is not complete."""
    if config.evaluation is None or not (directory.path / f"{file_stem(when)}.json").exists():
        return None
    judged = read_responses(directory, f"{file_stem(when)}.jsonl")
    return None if keys_of(benchmarks) - judged.keys() else collected(benchmarks, judged, config.evaluation.pass_k)


def write_evaluation(
    config: Config, benchmarks: Sequence[Benchmark], occasion: Occasion, result: EvaluationResult
) -> None:
    """Write the files of an evaluation that was made under another name already."""
    identity = identity_of(config, benchmarks, occasion.weights)
    log = ResponseLog(occasion.directory, f"{occasion.stem}.jsonl", identity)
    write_files(occasion, result, log, benchmarks, seconds=None)


def write_files(
    occasion: Occasion,
    result: EvaluationResult,
    log: ResponseLog,
    benchmarks: Sequence[Benchmark],
    *,
    seconds: float | None,
) -> None:
    """Write the sorted responses, outputs for other tools, and last the figures. If those are there, everything is."""
    log.complete(result.responses, benchmarks[0].template)
    for benchmark, each in zip(benchmarks, result.benchmarks, strict=True):
        if benchmark.verifier is None:
            problems, texts = (
                [source.problem for source in benchmark.sources],
                [row[0].response for row in each.responses],
            )
            outputs = outputs_of(problems, texts, generator=occasion.weights.name, dataset=benchmark.name)
            name = f"{occasion.stem}-outputs-{benchmark.name}.json"
            write_whole(occasion.directory.path / name, as_json(outputs))
    stated = read_json(occasion.weights / CONFIG_FILE)
    figures = result.evaluation_figures(
        model=str(occasion.weights.resolve()),  # resolved, since `RUN/student` is another one later
        model_fingerprint=log.identity.model,
        dtype=next((stated[key] for key in DTYPE_KEYS if key in stated), None),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=None if seconds is None else round(seconds, 1),
        settings=log.identity.settings,
        settings_fingerprint=settings_fingerprint(log.identity.settings),
    )
    write_whole(occasion.directory.path / f"{occasion.stem}.json", as_json(figures))


def is_complete(directory: RunDirectory, config: Config, benchmarks: Sequence[Benchmark], weights: Path) -> bool:
    """Return whether the directory holds the whole evaluation already.

    Raise DataError if it holds one, or a part of one, of another model or of other settings.
    """
    wanted = identity_of(config, benchmarks, weights)
    path = directory.path / f"{file_stem('')}.json"
    if not path.exists():
        ResponseLog(directory, f"{file_stem('')}.jsonl", wanted).check()
        return False
    found = read_figures(path)
    identity = Identity(model=found.model_fingerprint, backend=wanted.backend, settings=found.settings)
    check_same(identity, wanted, str(path))
    return True


def file_stem(when: str) -> str:
    return f"evaluation-{when}" if when else "evaluation"


async def open_environments(
    benchmarks: Sequence[Benchmark], vocabulary: Vocabulary | None, stack: AsyncExitStack
) -> dict[str, EnvironmentService]:
    """Open and return what answers the turns of each benchmark that is played, by the benchmark's name."""
    return {
        each.name: (await stack.enter_async_context(RunEnvironment(each.environment, vocabulary))).service
        for each in benchmarks
        if each.environment is not None and vocabulary is not None
    }


async def open_verifiers(settings: Mapping[str, PluginSettings | None], stack: AsyncExitStack) -> dict[str, Verifier]:
    """Open and return the verifiers of sets that have one, by the set's name. Equal settings share one verifier."""
    opened: dict[str, Verifier] = {}
    found: dict[str, Verifier] = {}
    for name, each in settings.items():
        if each is None:
            continue
        key = each.model_dump_json()
        if key not in opened:
            verifier: Verifier = registry.load("verifiers", each.kind)(each)
            opened[key] = await stack.enter_async_context(verifier)
        found[name] = opened[key]
    return found


def earlier_evaluation(
    config: Config, figures: EvaluationFigures, path: Path, directory: RunDirectory
) -> tuple[list[Benchmark], Occasion]:
    """Return what the responses beside a figures file are of, to judge them again. Raises as `saved_benchmarks`."""
    name = path.with_suffix(".jsonl")
    saved = read_responses(RunDirectory(name.parent), name.name)
    benchmarks = saved_benchmarks(config, saved, str(name))
    judged = {f"{each.key}.verifier": each.verifier.that_decide() for each in benchmarks if each.verifier is not None}
    kind = config.student.backend.kind
    identity = Identity(model=figures.model_fingerprint, backend=kind, settings=figures.settings | judged)
    return benchmarks, Occasion(directory, Path(figures.model), saved=saved, identity=identity)


async def judge_again(config: Config, benchmarks: Sequence[Benchmark], occasion: Occasion, console: Console) -> None:
    """Have saved responses judged by the verifiers of `benchmarks`, and write the files of a whole evaluation."""
    screen, events = RunConsole(console, 0), Channel()
    events.subscribe(screen, to=RunEvent)
    with screen.live():
        result = await measure(config, benchmarks, None, None, occasion, events)
    occasion.directory.write_summary({"evaluation": evaluation_summary(result)})


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
    events.subscribe(failures, to=failures.hears)
    events.subscribe(screen, watchdog, ledger_file, to=RunEvent)
    listener = StartListener(
        starting=lambda backends: events.publish(StepBegan("starting the student")),
        step=lambda name: events.publish(StepBegan(name)),
        warn=screen.warn,
        ready=screen.say,
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
        for warning in [*doubled_backslashes(config), *evaluation_warnings(benchmarks, student_files.vocabulary)]:
            screen.warn(warning)
        beside = Companions(spending=spending, listener=listener)
        opening = open_services(served, directory.path, cluster=config.cluster, beside=beside)
        try:
            async with alongside(watchdog.watch), opening as services:
                ledger_file.write(0)  # what was asked during the start
                occasion = Occasion(directory, student_files.directory)
                result = await measure(config, benchmarks, student_files.vocabulary, services.student, occasion, events)
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
