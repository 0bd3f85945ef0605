"""Writes what happened in a run to its directory: metrics, samples, dead letters, spending, events.

Metric names are `area/name`; docs/metrics.md explains how to read them. A metric of samples is the mean over those
samples that have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
import textwrap
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog

from spot_async.base.events import Event, logged_by, without_secrets
from spot_async.base.files import decode_json, whole_lines
from spot_async.base.tasks import error_words, first_error, leaves, root_cause
from spot_async.base.text import counted
from spot_async.errors import DataError, PluginError, RequestError
from spot_async.evaluation.metrics import over_all
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated, IterationFinished, PromptEnded, ResponseJudged, WeightsServed
from spot_async.run_directory.dead_letters import FILE_NAME, dead_letter
from spot_async.run_directory.layout import ENDS_EARLY, RunDirectory, append_whole
from spot_async.run_directory.ledger import SpendingRow
from spot_async.run_directory.reading import EVALUATION, EVALUATION_ITERATION
from spot_async.spending.account import FREE, Account, Spending
from spot_async.spending.run_spending import metered
from spot_async.stages.stages import Stages
from spot_async.telemetry.meters import PumpClock, RunMeters, phase_metrics, stage_metrics
from spot_async.telemetry.outcome_slope import outcome_metrics
from spot_async.telemetry.side_sink import MetricSink
from spot_async.trainer.feed_check import sampled_spans
from spot_async.types import Prompt, Sample

SPENDING_FILE = "spending.jsonl"
TEXTS = 8  # responses of an evaluation that sinks show
RESPONSES = 64  # of a stand-alone evaluation, between two rows of spending


@dataclass(eq=False)
class RunLog:
    """The listener that keeps the files of a run directory up to date. It begins to measure when it is made."""

    directory: RunDirectory
    stages: Stages
    sinks: Sequence[MetricSink] = ()
    meters: RunMeters = field(default_factory=RunMeters)
    _: KW_ONLY
    is_strict: bool = True  # else it is also written how far training and publishing are apart
    samples_every: int = 1
    evaluations: InitVar[Iterable[Evaluated]] = ()  # that were made before and are in no row yet

    def __post_init__(self, evaluations: Iterable[Evaluated]) -> None:
        self._publishing = None if self.is_strict else PumpClock("publish")
        self._served_step = 0
        self._eventful: set[str] = set()  # metrics that were not 0 all the time: sinks get no others
        self._last_counters = {stage.name: replace(stage.counters) for stage in self.stages.all}
        self._last_tokens = self.stages.tokens_generated
        self._iteration_started_s = time.monotonic()
        self._evaluations = deque(evaluations)  # those in no row yet; each row takes one

    def on(self, event: Event) -> None:
        if self._publishing is not None:
            self._publishing.on(event)
        match event:
            case WeightsServed():
                self._served_step = event.version.step
            case Evaluated():
                self._evaluations.append(event)
            case IterationFinished():
                self._write_iteration(event)
            case PromptEnded(prompt=prompt, error=RequestError() as error):
                self._write_dead_letter(prompt, error)

    def _write_iteration(self, result: IterationFinished) -> None:
        now_s = time.monotonic()
        elapsed_s = now_s - self._iteration_started_s
        evaluation = self._evaluations.popleft() if self._evaluations else None
        metrics = iteration_metrics(result, elapsed_s, evaluation)
        metrics |= self._generation_metrics(elapsed_s - result.times_s.evaluate)
        if self._publishing is not None and evaluation is not None:  # the trainer need not have waited for it
            metrics["time/evaluate_s"] = result.times_s.evaluate
        metrics |= self._publishing_metrics(result) | self.meters.take(elapsed_s)
        self._iteration_started_s = now_s
        if self.samples_every and result.iteration % self.samples_every == 0:
            lines = [sample_line(result.iteration, sample) for sample in result.samples]
            self.directory.append("samples.jsonl", lines)
        self.directory.append("metrics.jsonl", [{"iteration": result.iteration, "time": time.time(), **metrics}])
        self._eventful |= {name for name, value in metrics.items() if value}
        shown = {name: value for name, value in metrics.items() if name in self._eventful}
        texts = {} if evaluation is None else sample_texts(evaluation.result)
        for sink in self.sinks:
            sink.write(result.iteration, shown, texts)
        self.directory.weights.advance_student_to(Path(result.report.snapshot.directory))

    def _write_dead_letter(self, prompt: Prompt, error: RequestError) -> None:
        self.directory.append(FILE_NAME, [dead_letter(prompt, error)])
        structlog.get_logger().warning(
            "prompt died", problem_id=prompt.problem.id, failure=error.failure_class.value, reason=str(error)
        )

    def _publishing_metrics(self, result: IterationFinished) -> dict[str, float]:
        """Return what the publish pump did during the iteration, and how old what was trained on is."""
        if self._publishing is None:
            return {}
        seconds = self._publishing.take(asyncio.get_running_loop().time())
        return {
            "weights/served": float(self._served_step),
            **phase_metrics(seconds),
            **{f"lag/{lag}": float(tokens) for lag, tokens in sorted(tokens_by_lag(result).items())},
        }

    def _generation_metrics(self, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of generated tokens and of each stage's requests in the iteration that has just ended."""
        metrics: dict[str, float] = {}
        tokens = self.stages.tokens_generated
        if tokens and elapsed_s > 0:  # a run in which no model generates has no such metric
            metrics["throughput/generated_tokens_per_s"] = (tokens - self._last_tokens) / elapsed_s
        self._last_tokens = tokens
        for stage in self.stages.all:
            now, last = stage.counters, self._last_counters[stage.name]
            self._last_counters[stage.name] = replace(now)
            metrics |= stage_metrics(stage.name, now, last, elapsed_s)
        return metrics


def sample_line(iteration: int, sample: Sample) -> dict[str, Any]:
    """Return a sample's record with its iteration, its metrics and, unless the policy wrote it, its problem."""
    problem = {} if sample.supervision is None else {"problem_id": sample.supervision.problem_id}
    return {"iteration": iteration, **problem, "metrics": sample.metrics, **sample.record}


def iteration_metrics(
    result: IterationFinished, elapsed_s: float, evaluation: Evaluated | None = None
) -> dict[str, float]:
    """Return the metrics `rollout/...`, `train/...`, `perf/...`, `time/...`, `wait/...` and others of one iteration.

    `evaluation` is the oldest that is in no row yet. With staleness it may be of earlier weights.
    """
    times_s = result.times_s
    metrics = {
        **result.means,
        **spread_metrics(result.samples),
        **outcome_metrics(result.samples),
        **{f"train/{name}": value for name, value in result.report.metrics.items()},
        **{f"perf/{name}": value for name, value in result.report.performance.items()},
        "time/iteration_s": elapsed_s,
        "time/wait_for_batch_s": times_s.wait_for_batch,
        "time/train_s": times_s.train,
        **({"time/look_s": times_s.look, "time/revise_s": times_s.revise} if times_s.look else {}),
        "time/update_weights_s": times_s.update_weights,
        **{f"wait/{stage}_s": seconds for stage, seconds in times_s.waited_for.items()},
    }
    if evaluation is not None:
        metrics |= {"time/evaluate_s": evaluation.seconds, **evaluation_metrics(evaluation.result)}
        if evaluation.iteration != result.iteration:
            metrics[EVALUATION_ITERATION] = float(evaluation.iteration)
    return metrics


def tokens_by_lag(result: IterationFinished) -> Counter[int]:
    """Return how many tokens of an iteration come from weights so many steps older than those that it started from."""
    live_step = result.report.snapshot.version.step - 1
    tokens: Counter[int] = Counter()
    for sample in result.samples:
        for span in sampled_spans(sample.supervision) if sample.supervision is not None else ():
            tokens[live_step - span.version.step] += span.end - span.start
    return tokens


def evaluation_metrics(evaluation: EvaluationResult | None) -> dict[str, float]:
    """Return an evaluation's figures as metrics: over all problems, and for each tier.

    A figure over a single problem has no standard error.
    """
    if evaluation is None:
        return {}
    metrics: dict[str, float | None] = {}
    for row, figures in evaluation.rows.items():
        if figures.avg is None:
            continue
        area = "evaluation" if figures is over_all(evaluation.rows) else f"evaluation/{row}"
        named = {f"avg@{figures.samples}": figures.avg, **{f"pass@{k}": each for k, each in figures.pass_at.items()}}
        for name, estimate in named.items():
            metrics |= {
                f"{area}/{name}": estimate.value,
                f"{area}/{name}_standard_error": estimate.standard_error,
            }
    return {name: value for name, value in metrics.items() if value is not None}


def spread_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return how far an iteration's rollouts are apart: in length, in reward, and within the group of each problem."""
    lengths: list[float] = []
    rewards: defaultdict[str, list[float]] = defaultdict(list)  # by problem
    for sample in samples:
        if (length := sample.metrics.get("rollout/tokens")) is not None:
            lengths.append(length)
        if (reward := sample.metrics.get("rollout/reward")) is not None:
            rewards[str(sample.record.get("problem_id"))].append(reward)
    metrics = {"rollout/longest_tokens": max(lengths), "rollout/shortest_tokens": min(lengths)} if lengths else {}
    if len(every := [reward for group in rewards.values() for reward in group]) > 1:
        metrics["rollout/reward_spread"] = statistics.pstdev(every)
    if groups := [group for group in rewards.values() if len(group) > 1]:
        metrics["rollout/groups_without_spread"] = sum(len(set(group)) == 1 for group in groups) / len(groups)
    return metrics


def sample_texts(evaluation: EvaluationResult) -> dict[str, str]:
    """Return a few responses of an evaluation as Markdown by name, to the same problems each time."""
    responses = [row[0] for each in evaluation.benchmarks for row in each.responses]
    chosen = responses[:: max(1, len(responses) // TEXTS)][:TEXTS]
    return {
        f"{EVALUATION}sample_{number}": f"{each.verdict or 'not judged'}, {counted(each.tokens, 'token')}\n\n"
        + textwrap.indent(f"{each.problem}\n\n{each.response}", "    ")  # as code: nothing is marked up
        for number, each in enumerate(chosen, start=1)
    }


class _Row(Spending, kw_only=True):
    role: str
    server: str
    currency: str = FREE.currency


class SpendingLog:
    """The listener that keeps `spending.jsonl`: what a run was billed so far, by endpoint.

    Rows are cumulative, one for each endpoint of each account. They are written after the start, after every iteration,
    after every `RESPONSES` of a stand-alone evaluation, and when the run ends, however it ends. A training run's ledger
    has newer counts, so after a kill only what was running is unknown.
    """

    def __init__(self, directory: RunDirectory, accounts: Mapping[str, Account], *, trains: bool = True) -> None:
        """`trains`: whether it is a training run, and not a stand-alone evaluation."""
        self._trains = trains
        self._directory = directory
        self._accounts = metered(accounts)

    def on(self, event: Event) -> None:
        match event:
            case IterationFinished(iteration=iteration):
                self.write(iteration)
            case ResponseJudged(finished=finished) if not self._trains and finished % RESPONSES == 0:
                self.write(0)

    def go_on(self, kept: Iterable[SpendingRow] = ()) -> None:
        """Continue the counts of a run that was stopped. Raises DataError for a damaged file.

        `kept` is what the ledger has. Where it is newer, what was under way then counts as sent and never answered.
        """
        path = self._directory.path / SPENDING_FILE
        lines = list(whole_lines(path)) if self._accounts else []
        if self._accounts and path.exists():
            os.truncate(path, sum(map(len, lines)))  # of a torn last line
        for number, line in enumerate(lines, start=1):
            try:
                row = decode_json(line, _Row, f"{path}:{number}: cannot continue with this file")
            except DataError as error:
                raise DataError(f"{error}: restore or remove it") from None
            if row.role in self._accounts:
                if row.money and row.currency != (now := self._accounts[row.role].currency):
                    raise DataError(
                        f"{path}:{number}: {row.money:g} {row.currency} are spent, and {row.role}.backend.prices are "
                        f"in {now} now: set currency back, or begin in another run.directory"
                    )
                found = {name: getattr(row, name) for name in Spending.__struct_fields__}
                self._accounts[row.role].spending[row.server] = Spending(**found)
        for role, server, settled, in_flight in kept:
            if role in self._accounts:
                counted = self._accounts[role].spending.get(server, Spending())
                if settled.requests >= counted.requests:
                    settled.add(in_flight)
                    self._accounts[role].spending[server] = settled

    def write(self, iteration: int | None = None) -> None:
        """Write a row for each endpoint. An iteration of None stands for the end of the run."""
        rows = [
            {"time": time.time(), "iteration": iteration, "role": role, "server": server}
            | msgspec.structs.asdict(spending)
            | {"currency": account.currency}
            for role, account in self._accounts.items()
            for server, spending in account.spending.items()
        ]
        if rows:
            self._directory.append(SPENDING_FILE, rows)


@contextlib.contextmanager
def log_events_to(path: Path) -> Iterator[None]:
    """Send this process's structlog events to a JSONL file while inside, and afterwards to where they went before.

    A line that a full disk does not take is dropped, since a log must not end its run.
    """
    lock, file = threading.Lock(), path.open("ab", buffering=0)

    def append(logger: object, method: str, line: str) -> NoReturn:
        with lock, contextlib.suppress(OSError):
            append_whole(file, f"{line}\n".encode())
        raise structlog.DropEvent  # it goes nowhere else

    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _without_nan,
        structlog.processors.JSONRenderer(),
        without_secrets,
        append,
    ]
    try:
        with logged_by(processors=processors, logger_factory=structlog.ReturnLoggerFactory()):
            try:
                yield
            except Exception as error:
                if any(isinstance(each, PluginError) for each in leaves(error)):  # people get one line, the log a trace
                    structlog.get_logger().error("plug-in at fault", exc_info=error)
                structlog.get_logger().error(ENDS_EARLY, reason=_reason(error))
                raise
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _without_nan(logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Return an event with null for NaN and infinities, for which JSON has no word, though Python would write one."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in event.items()
    }


def _reason(error: Exception) -> str:
    try:
        return error_words(root_cause(error))
    except Exception:  # noqa: BLE001 - a bug in describing an error must not hide the error itself
        return error_words(first_error(error))
