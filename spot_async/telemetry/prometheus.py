"""Serves a run's newest metrics to Prometheus, and what its stages hold right now; to people, at `/`, its report.

A name of docs/metrics.md such as `stage/probe/mean_latency_s` is `spot_async_stage_mean_latency_seconds{stage="probe"}`
here: its first and its last part, with the unit spelled out, and what is between them as a label. Every sample has the
run's name as the label `run`.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from spot_async.base.addresses import host_of, is_loopback
from spot_async.errors import FailureClass
from spot_async.stages.stage import Stage
from spot_async.telemetry.side_sink import MetricSink, split_row

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    Family = CounterMetricFamily | GaugeMetricFamily

PREFIX = "spot_async_"
# What the middle of a name says, by its first part: a label's name.
LABELS = {"stage": "stage", "replica": "replica", "spending": "role", "traffic": "role", "evaluation": "set"}
OTHER_LABEL = "of"
REPORT_EVERY_S, REPORT_TIMEOUT_S = 30.0, 60.0

WsgiApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def family_of(metric: str) -> tuple[str, str, str]:
    """Return a metric's name for Prometheus, and its label: name and value, which may be empty."""
    area, _, rest = metric.partition("/")
    middle, _, figure = rest.rpartition("/")
    name = re.sub(r"\W", "_", f"{PREFIX}{area}_{figure}".rstrip("_"), flags=re.ASCII)
    name = re.sub(r"_per_s$", "_per_second", name)
    return re.sub(r"_s$", "_seconds", name), LABELS.get(area, OTHER_LABEL), middle


@contextmanager
def prometheus_endpoint(
    host: str, port: int, run: Path, iterations: int, stages: Callable[[], Sequence[Stage[Any]]]
) -> Iterator[MetricSink]:
    """Serve `http://host:port/metrics` of the run in the directory `run`, which plans so many `iterations`.

    Raises OSError if it cannot listen there.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

    sink, registry = _Sink(run.name, iterations, stages), CollectorRegistry()
    registry.register(sink)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise OSError(f"cannot listen on {host}: {error.strerror}; choose another port") from None
    app = _with_report(make_wsgi_app(registry), run)
    server.set_app(_for_known_names(app, is_open=not is_loopback(host)))
    try:
        yield sink
    finally:
        server.shutdown()
        server.server_close()
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
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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


def _with_report(app: WsgiApp, run: Path) -> WsgiApp:
    """Return the app with the run's report at `/`, which is made again if it is older than `REPORT_EVERY_S`.

    A process of its own makes it, so that the run's own thread goes on.
    """
    command = [sys.executable, "-m", "spot_async", "report", str(run)]
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME", "LANG") if name in os.environ}
    lock, made_s = threading.Lock(), -math.inf

    def answered(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal made_s
        if environ.get("PATH_INFO") != "/":
            return app(environ, start_response)
        with lock:
            if time.monotonic() - made_s >= REPORT_EVERY_S:
                subprocess.run(command, env=environment, capture_output=True, timeout=REPORT_TIMEOUT_S, check=False)
                made_s = time.monotonic()
        page = run / "report.html"
        if not page.exists():
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"there is no report yet: {' '.join(command[1:])} says why\n".encode()]
        again = ("Refresh", f"{REPORT_EVERY_S:.0f}")
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), again])
        return [page.read_bytes()]

    return answered


def _for_known_names(app: WsgiApp, *, is_open: bool) -> WsgiApp:
    """Return the app with a guard that refuses requests whose `Host` is a name of somebody else's.

    Otherwise a web page could let its own name point to this machine (DNS rebinding), and read the reply. If the port
    `is_open` to others, addresses are right too, which no web page's name can be, and so is this machine's name.
    """

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        authority = environ.get("HTTP_HOST", "")
        host = host_of(authority)
        if not authority or is_loopback(host) or (is_open and _is_own(host)):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        others = f"an address or {socket.gethostname()}" if is_open else "localhost or 127.0.0.1"
        return [f"Host: {authority} is another machine's name: ask for {others}\n".encode()]

    return guarded


def _is_own(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return host.lower() in {socket.gethostname().lower(), socket.getfqdn().lower()}
