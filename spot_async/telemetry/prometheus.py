"""Serves a run's newest metrics to Prometheus, and what its stages hold right now; to people, at `/`, its report.

A name of docs/metrics.md such as `stage/probe/mean_latency_s` is `spot_async_stage_mean_latency_seconds{stage="probe"}`
here: its first and its last part, with the unit spelled out, and what is between them as a label. Every sample has the
run's name as the label `run`.
"""

from __future__ import annotations

import asyncio
import html
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.asgi import make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from spot_async.base.connection_room import STRANGERS, listening_at
from spot_async.base.files import read_bounded
from spot_async.base.processes.child import ChildProcess
from spot_async.base.tasks import error_words
from spot_async.errors import FailureClass, SpotError
from spot_async.serving.api import Credentials
from spot_async.serving.http.connections import HttpServer
from spot_async.serving.http.requests import Access, Api, App, Refusal
from spot_async.stages.stage import Stage
from spot_async.telemetry.side_sink import MetricSink, split_row

Family = CounterMetricFamily | GaugeMetricFamily

PREFIX = "spot_async_"
# What the middle of a name says, by its first part: a label's name.
LABELS = {"stage": "stage", "replica": "replica", "spending": "role", "traffic": "role", "evaluation": "set"}
OTHER_LABEL = "of"
REPORT_EVERY_S, REPORT_TIMEOUT_S = 30.0, 60.0
MOST_REPORT_BYTES = 64 << 20
PATIENCE_S = 10  # for a request, and for an answer to be taken


def family_of(metric: str) -> tuple[str, str, str]:
    """Return a metric's name for Prometheus, and its label: name and value, which may be empty."""
    area, _, rest = metric.partition("/")
    middle, _, figure = rest.rpartition("/")
    name = re.sub(r"\W", "_", f"{PREFIX}{area}_{figure}".rstrip("_"), flags=re.ASCII)
    name = re.sub(r"_per_s$", "_per_second", name)
    return re.sub(r"_s$", "_seconds", name), LABELS.get(area, OTHER_LABEL), middle


@contextmanager
def prometheus_endpoint(
    host: str, port: int, run: Path, iterations: int, stages: Callable[[], Sequence[Stage[Any]]], report: Sequence[str]
) -> Iterator[MetricSink]:
    """Serve `http://host:port/metrics` of the run in the directory `run`, which plans so many `iterations`.

    `report` is the program that writes the report of a run, its last word. Raises OSError if it cannot listen there.
    """
    sink, registry = _Sink(run.name, iterations, stages), CollectorRegistry()
    registry.register(sink)
    pages = Api("/", {"/metrics": ("GET", make_asgi_app(registry)), "/": ("GET", _Report(run, report))}, _refused)
    app = App(Access(Credentials(), is_local=True, other_api=pages), pages)
    server = HttpServer(app, places=STRANGERS, patience_s=PATIENCE_S, log_config=None, log_level="critical")
    try:
        listener = listening_at(host, port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # below 0: of names
        raise OSError(f"cannot listen on {host}: {reason}; choose another port") from None
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="metrics", daemon=True)
    thread.start()
    try:
        yield sink
    finally:
        server.should_exit = True
        thread.join()


class _Sink:
    def __init__(self, run: str, iterations: int, stages: Callable[[], Sequence[Stage[Any]]]) -> None:
        self._run = run
        self._planned = iterations
        self._stages = stages
        self._newest: tuple[int, float, Mapping[str, float]] = (0, 0.0, {})  # iteration, when it ended, its metrics

    def write(self, iteration: int, metrics: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
        self._newest = (iteration, time.time(), metrics)

    def go_back(self, rows: Sequence[Mapping[str, float]]) -> None:
        for row in rows[-1:]:
            self.write(*split_row(row))

    def conclude(self, iteration: int, figures: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
        self.write(iteration, {**self._newest[2], **figures})

    def collect(self) -> Iterator[Metric]:
        """Yield what a scrape gets. Runs in the server's thread, so it reads only plain numbers of the loop's."""
        iteration, ended_s, metrics = self._newest
        families: dict[str, Family] = {}

        def add(kind: type[Family], name: str, words: str, labels: Mapping[str, str], value: float) -> None:
            if name not in families:
                families[name] = kind(name, words, labels=["run", *labels])
            families[name].add_metric([self._run, *labels.values()], value)

        add(CounterMetricFamily, f"{PREFIX}iterations", "iterations finished", {}, iteration)
        add(GaugeMetricFamily, f"{PREFIX}iterations_planned", "iterations of the whole run", {}, self._planned)
        if ended_s:
            words = "when the newest iteration ended, since 1970"
            add(GaugeMetricFamily, f"{PREFIX}last_iteration_timestamp_seconds", words, {}, ended_s)
        for metric, value in metrics.items():
            name, label, middle = family_of(metric)
            words = f"{metric.replace(f'/{middle}/', f'/<{label}>/')} of the newest iteration: docs/metrics.md"
            add(GaugeMetricFamily, name, words, {label: middle}, value)
        for stage in self._stages():
            named = {"stage": stage.name}
            waiting, in_flight = "requests that wait for their turn", "requests being answered"
            add(GaugeMetricFamily, f"{PREFIX}requests_waiting", waiting, named, stage.waiting)
            add(GaugeMetricFamily, f"{PREFIX}requests_in_flight", in_flight, named, stage.in_flight)
            for outcome in ("completed", "failed"):
                count, words = getattr(stage.counters, outcome), "requests that came to an end, by outcome"
                add(CounterMetricFamily, f"{PREFIX}requests", words, {**named, "outcome": outcome}, count)
            for failure in FailureClass:
                count, words = getattr(stage.counters, failure), "attempts of requests that failed, by failure"
                add(CounterMetricFamily, f"{PREFIX}failed_attempts", words, {**named, "failure": failure}, count)
        yield from families.values()


def _refused(error: Refusal | SpotError) -> Response:
    return PlainTextResponse(f"{error}\n", error.status if isinstance(error, Refusal) else 500)


class _Report:
    """Answers with the run's report, which is made again if it is older than `REPORT_EVERY_S`.

    A process of its own makes it, so that the run's own thread goes on. There is one at a time.
    """

    def __init__(self, run: Path, program: Sequence[str]) -> None:
        self._run = run
        self._program = program
        self._making = asyncio.Lock()
        self._made_s = -math.inf
        self._error = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._making:
            if self._program and time.monotonic() - self._made_s >= REPORT_EVERY_S:
                self._error = await self._make()
                self._made_s = time.monotonic()
        await self._page()(scope, receive, send)

    def _page(self) -> Response:
        path = self._run / "report.html"
        try:
            page, written = read_bounded(path, MOST_REPORT_BYTES), time.localtime(path.stat().st_mtime)
        except OSError as error:
            return PlainTextResponse(f"there is no report yet: {self._error or error_words(error)}\n", 503)
        failed = self._error and f"; the newest could not be made: {self._error}"
        line = html.escape(f"written at {time.strftime('%Y-%m-%d %H:%M:%S %Z', written)}{failed}")
        again = {"Refresh": f"{REPORT_EVERY_S:.0f}"}
        return HTMLResponse(page.replace(b"<main>", f"<main><p>{line}</p>".encode(), 1), headers=again)

    async def _make(self) -> str:
        """Make it, and return why that failed: "" if it did not."""
        log = self._run / "logs" / "report.log"
        command = [*self._program, str(self._run)]
        ours = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        try:
            log.unlink(missing_ok=True)
            child = await ChildProcess.start_foreign("the report", command, log_path=log, environment=ours)
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    code = await child.wait()
            finally:
                await child.stop()
        except TimeoutError:
            return f"not done within {REPORT_TIMEOUT_S:g} s"
        except (OSError, SpotError) as error:
            return error_words(error)
        return child.describe_end(code) if code else ""
