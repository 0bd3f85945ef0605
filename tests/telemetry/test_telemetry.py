"""One set of metrics, the same in every sink, and all of them documented."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import pytest
import structlog
from event_files import records, shown_steps
from iterations import finished_iteration
from metrics_page import scrape
from rich.console import Console
from rich.text import Text
from run_files import make_run, metrics_row
from small_runs import NAMED

from spot_async.backends.shared.launch import free_port
from spot_async.base.connection_room import STRANGERS
from spot_async.config import TelemetryConfig
from spot_async.config.loading import validate
from spot_async.errors import ConfigError
from spot_async.evaluation.response_log import JudgedResponse
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult
from spot_async.loop.events import (
    WAITS_FOR,
    Evaluated,
    PhaseBegan,
    ResponseJudged,
    StepBegan,
)
from spot_async.run_directory.layout import RunDirectory
from spot_async.stages.stage import StageCounters
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.meters import LoopLag, RunMeters
from spot_async.telemetry.run_log import RunLog, log_events_to
from spot_async.telemetry.sinks import check_packages, open_sinks
from spot_async.types import Sample, Verdict, WeightSnapshot, WeightVersion

METRICS = {"rollout/accuracy": 0.25, "evaluation/avg@8": 0.5}


@pytest.fixture(scope="module", autouse=True)
def wandb_offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        yield


@pytest.fixture(scope="module", autouse=True)
def prompt_ends():
    """Python's servers look twice a second whether they are to end: here, a hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))
        yield


REPORT = (sys.executable, "-P", "-m", "spot_async", "report")


def config(**telemetry):
    return validate({**NAMED, "telemetry": telemetry})


def test_nothing_is_opened_or_imported_unless_asked_for(tmp_path):
    before = set(sys.modules)
    with open_sinks(config(), tmp_path) as sinks:
        assert sinks == []
    assert not {"tensorboardX", "wandb", "prometheus_client"} & (set(sys.modules) - before)
    assert list(tmp_path.iterdir()) == []


def written_screen(iterations, **terminal):
    """A screen of a run of so many iterations, and what is written on it."""
    text = io.StringIO()
    return RunConsole(Console(file=text, **{"width": 200, **terminal}), iterations), text


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"rollout/accuracy": 0.25}, "iteration 1/9 · accuracy 25.0 % · loss"),
        ({"teacher/accuracy": 0.75}, "iteration 1/9 · teacher accuracy 75.0 % · loss"),
        ({}, "iteration 1/9 · accuracy – · loss"),
        ({"teacher/masked": 0.97}, "iteration 1/9 · accuracy – · masked 97.0 % · loss"),
        ({"teacher/masked": 0.0}, "iteration 1/9 · accuracy – · loss"),
    ],
)
def test_a_line_of_progress_says_whose_responses_are_correct(metrics, words):
    screen, text = written_screen(iterations=9)
    screen.on(finished_iteration(1, [Sample(supervision=None, metrics=metrics, record={})], loss=1.0))
    assert words in text.getvalue()


@pytest.fixture
def now_s(monkeypatch):
    """What the screen's clock says, which began at midnight."""
    now_s = [0.0]
    clock = {"monotonic": lambda: now_s[0], "strftime": lambda form: time.strftime(form, time.gmtime(now_s[0]))}
    monkeypatch.setattr("spot_async.telemetry.console.time", SimpleNamespace(**clock))
    return now_s


def test_a_log_is_told_now_and_then_how_far_an_evaluation_is(now_s):
    screen, text = written_screen(iterations=9)
    screen.on(StepBegan("evaluating before"))
    for finished in range(1, 71):
        now_s[0] += 1.0
        screen.on(ResponseJudged(finished, 4000))
    assert text.getvalue().splitlines() == [
        "[00:00:00] evaluating before",
        "[00:00:30] evaluating before: 30 of 4,000 responses · about 66 min left",
        "[00:01:00] evaluating before: 60 of 4,000 responses · about 66 min left",
    ]
    screen.on(StepBegan("evaluating after"))  # one that continues where 3,000 are kept: they say nothing of the pace
    for finished in range(3001, 3031):
        now_s[0] += 1.0
        screen.on(ResponseJudged(finished, 4000))
    assert text.getvalue().splitlines()[-1].endswith("3,030 of 4,000 responses · about 16 min left")


def test_a_line_of_progress_says_how_long_training_will_take_evaluations_in_between_included(now_s):
    screen, text = written_screen(iterations=4)
    orchestrator = SimpleNamespace(state=SimpleNamespace(iteration=0))
    now_s[0] += 100.0  # starting
    for iteration in range(1, 5):
        screen.on(StepBegan("training", orchestrator))
        now_s[0] += 10.0
        if iteration == 2:
            screen.on(StepBegan("evaluating"))
            now_s[0] += 40.0
            screen.on(StepBegan("training", orchestrator))
        screen.on(finished_iteration(iteration, loss=1.0))
    lines = [line for line in text.getvalue().splitlines() if "] iteration" in line]
    assert [line.rpartition(" · ")[2] for line in lines[:3]] == [
        "about 30 s left",
        "about 60 s left",
        "about 23 s left",
    ]
    assert "left" not in lines[3]


def test_a_run_that_goes_back_to_an_earlier_iteration_says_anew_how_long_it_will_take(now_s):
    screen, text = written_screen(iterations=30)
    for first, seconds in ((21, 100.0), (20, 10.0)):  # with another orchestrator
        screen.on(StepBegan("training", SimpleNamespace(state=SimpleNamespace(iteration=first - 1))))
        now_s[0] += seconds
        screen.on(finished_iteration(first, loss=1.0))
    *_, line = text.getvalue().splitlines()
    assert line.startswith("[00:01:50] iteration 20/30")
    assert line.endswith("about 100 s left")


def asynchronous_run():
    """What a screen reads of one whose trainer is two steps ahead."""
    stages = SimpleNamespace(all=[], tokens_generated=0)
    versions = {"trained": WeightVersion(0, 13), "served": WeightVersion(0, 11)}
    book, state = SimpleNamespace(waiting=3), SimpleNamespace(iteration=13)
    return SimpleNamespace(state=state, is_strict=False, stages=stages, book=book, **versions)


def test_the_panel_of_an_asynchronous_run_shows_both_pumps_their_versions_and_the_lag():
    screen, text = written_screen(iterations=20, width=120, force_terminal=True)
    performance = {"tokens_per_s_per_rank": 9000.0, "mfu": 0.31, "max_memory_allocated_gib": 61.25}
    screen.on(StepBegan("training with opd", asynchronous_run()))
    screen.on(finished_iteration(13, performance=performance, loss=1.0, lag_mean=0.75, lag_max=2.0))
    screen.on(PhaseBegan("train", 14, "wait for batch", 0.0))
    screen.on(PhaseBegan("publish", 12, "update weights", 0.0))
    with screen.live():
        pass
    panel = Text.from_ansi(text.getvalue()).plain
    assert "weights: 13 trained, 11 served · lag 0.75 mean, 2 max" in panel
    assert "trainer: 9,000 tokens/s a GPU, MFU 31.0 %, peak 61.2 GiB" in panel
    assert "the trainer waits for supervision · publishing waits for the weight update" in panel
    assert not any(each in words for each in ("the trainer", "publishing") for words in WAITS_FOR.values())


def test_an_evaluation_beside_training_is_shown_with_it(now_s):
    (screen, text), orchestrator = written_screen(iterations=20), asynchronous_run()
    screen.on(StepBegan("training with opd", orchestrator))
    screen.on(StepBegan("evaluating after iteration 12", orchestrator))
    for finished in range(1, 32):
        now_s[0] += 1.0
        screen.on(ResponseJudged(finished, 4000))
    screen.on(finished_iteration(14, lag_mean=0.5, lag_max=1.0))
    *_, progress, _, iteration = text.getvalue().splitlines()
    assert progress.endswith("evaluating after iteration 12: 30 of 4,000 responses")
    assert "iteration 14/20" in iteration
    assert "lag 0.50 mean, 1 max · about 3 min left" in iteration  # 31 s for one, since the screen saw only one


def test_a_line_of_progress_says_whose_weights_the_held_out_figures_are_of():
    screen, text = written_screen(iterations=9)
    response = JudgedResponse(
        problem_id="p", sample=0, verdict=Verdict.CORRECT, tokens=1, finish_reason="stop", response=""
    )
    result = EvaluationResult((BenchmarkResult(tiers=("all",), responses=((response,),)),))
    snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 5))
    for row in (5, 6):
        screen.on(Evaluated(5, result, snapshot, 1.0))
        screen.on(finished_iteration(row))
    own, later = (line for line in text.getvalue().splitlines() if "] iteration" in line)
    assert "· held out: Avg@1 100.0 %" in own
    assert "· held out after iteration 5: Avg@1 100.0 %" in later


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen, text = written_screen(iterations=9, force_terminal=True)
    with screen.live():
        screen.on(StepBegan("training"))
    assert re.fullmatch(r"\[\d\d:\d\d:\d\d\] training\n", text.getvalue())


def test_prometheus_serves_the_newest_metrics_and_the_stages_as_they_are(tmp_path):
    port = free_port()
    counters = StageCounters(completed=90, failed=2, transient=41)
    stage = SimpleNamespace(name="probe", waiting=3, in_flight=7, counters=counters)
    metrics = METRICS | {
        "evaluation/easy/avg@8": 0.75,
        "stage/probe/mean_latency_s": 0.5,
        "replica/student/0/limit": 9.0,
        "throughput/generated_tokens_per_s": 70.0,
        "loss": 2.0,
    }
    directory = tmp_path / "first"
    directory.mkdir()
    with open_sinks(config(prometheus_port=port), directory, 60, lambda: [stage]) as sinks:
        assert 'spot_async_iterations_total{run="first"} 0.0' in scrape(port)
        for sink in sinks:
            sink.write(4, metrics)
        stage.in_flight = 8
        text = scrape(port, 'iterations_total{run="first"} 4.0')
    for line in (
        "# HELP spot_async_iterations_total iterations finished",
        "# TYPE spot_async_iterations_total counter",
        'spot_async_iterations_total{run="first"} 4.0',
        'spot_async_iterations_planned{run="first"} 60.0',
        'spot_async_rollout_accuracy{of="",run="first"} 0.25',
        'spot_async_evaluation_avg_8{run="first",set=""} 0.5',
        'spot_async_evaluation_avg_8{run="first",set="easy"} 0.75',
        "# HELP spot_async_stage_mean_latency_seconds stage/<stage>/mean_latency_s of the newest iteration: "
        "docs/metrics.md",
        'spot_async_stage_mean_latency_seconds{run="first",stage="probe"} 0.5',
        'spot_async_replica_limit{replica="student/0",run="first"} 9.0',
        'spot_async_throughput_generated_tokens_per_second{of="",run="first"} 70.0',
        'spot_async_loss{of="",run="first"} 2.0',
        'spot_async_requests_waiting{run="first",stage="probe"} 3.0',
        'spot_async_requests_in_flight{run="first",stage="probe"} 8.0',
        'spot_async_requests_total{outcome="completed",run="first",stage="probe"} 90.0',
        'spot_async_requests_total{outcome="failed",run="first",stage="probe"} 2.0',
        'spot_async_failed_attempts_total{failure="transient",run="first",stage="probe"} 41.0',
    ):
        assert line in text.splitlines(), line
    (ended,) = re.findall(r"^spot_async_last_iteration_timestamp_seconds.* (\S+)$", text, re.MULTILINE)
    assert abs(float(ended) - time.time()) < 60
    if promtool := shutil.which("promtool"):
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def page(port, again_s=30):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as reply:
        assert reply.headers["Refresh"] == str(again_s)
        return reply.read().decode()


def test_the_metrics_port_has_the_runs_report_which_is_made_again_only_after_a_while(tmp_path):
    files, port = make_run(tmp_path / "run", [], [metrics_row(1)]), free_port()
    with open_sinks(config(prometheus_port=port), files.path, report=REPORT):
        assert "iterations: 1 of 4" in page(port)
        RunDirectory.open(files.path).append("metrics.jsonl", [metrics_row(2)])
        assert "iterations: 1 of 4" in page(port)
        assert "spot_async_iterations_total" in scrape(port)
    (tmp_path / "none").mkdir()
    with open_sinks(config(prometheus_port=port), tmp_path / "none"), pytest.raises(urllib.error.HTTPError) as refused:
        page(port)
    assert (refused.value.code, b"there is no report yet" in refused.value.read()) == (503, True)


def test_the_metrics_page_has_one_maker_at_a_time_and_shows_its_last_error_and_when_it_was_written(
    tmp_path, monkeypatch
):
    files, port = make_run(tmp_path / "run", [], [metrics_row(1)]), free_port()
    with open_sinks(config(prometheus_port=port), files.path, report=REPORT), ThreadPoolExecutor(4) as visitors:
        first = [asked.result() for asked in [visitors.submit(page, port) for _ in range(4)]]
        assert (files.path / "logs" / "report.log").read_text().count("page: ") == 1
        assert re.search(r"<p>written at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", first[0])
        assert len({*first}) == 1
        monkeypatch.setattr("spot_async.telemetry.prometheus.REPORT_EVERY_S", 0)
        (files.path / "config.yaml").write_text("]")
        failed = r"<p>written at .*; the newest could not be made: the report \(pid \d+\) exited with code 2"
        assert re.search(failed, page(port, again_s=0))
        monkeypatch.setattr("spot_async.telemetry.prometheus.REPORT_TIMEOUT_S", 0)
        assert "the newest could not be made: not done within 0 s" in page(port, again_s=0)


def test_the_metrics_port_answers_other_methods_and_paths_as_http_has_them(tmp_path):
    port = free_port()

    def asked(method, path):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
            client.request(method, path)
            reply = client.getresponse()
            return reply.status, reply.getheader("Allow"), bool(reply.read())

    with open_sinks(config(prometheus_port=port), tmp_path):
        assert asked("GET", "/metrics") == (200, None, True)
        assert asked("HEAD", "/metrics") == (200, None, False)
        assert asked("HEAD", "/") == (503, None, False)  # there is no run
        for method, path in itertools.product(("POST", "PUT", "DELETE", "OPTIONS"), ("/", "/metrics")):
            assert asked(method, path) == (405, "GET, HEAD", True)
        assert asked("GET", "/none")[0] == asked("POST", "/metric")[0] == 404


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nHost: loc"])
def test_idle_connections_to_the_metrics_port_take_few_places_and_keep_nobody_out(tmp_path, said):
    port = free_port()
    with open_sinks(config(prometheus_port=port), tmp_path), ExitStack() as held:
        idle = [held.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(100)]
        for each in idle:
            with suppress(ConnectionError):  # it was dropped for others
                each.sendall(said)
        assert "spot_async_iterations" in scrape(port)
        for each in idle[: -STRANGERS - 1]:
            with suppress(ConnectionError):
                assert each.recv(1) == b""


def test_who_is_silent_at_the_metrics_port_is_dropped_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("spot_async.telemetry.prometheus.PATIENCE_S", 0)
    port = free_port()
    with open_sinks(config(prometheus_port=port), tmp_path), suppress(ConnectionError), socket.socket() as idle:
        idle.settimeout(60)
        idle.connect(("127.0.0.1", port))
        assert idle.recv(1) == b""


def test_prometheus_listens_on_loopback_only(tmp_path):
    port = free_port()
    with open_sinks(config(prometheus_port=port), tmp_path), socket.socket() as other:
        other.bind(("127.0.0.2", port))  # would be taken by a server on all addresses


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_prometheus_answers_requests_for_this_machine_only(tmp_path, host):
    port = free_port()
    with open_sinks(config(prometheus_port=port), tmp_path):
        page = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": "metrics.evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(page)
        assert refused.value.read().decode().startswith("Host: metrics.evil.example is another machine's name")
        named = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": f"{host}:{port}"})
        assert b"spot_async_iteration" in urllib.request.urlopen(named).read()


def test_prometheus_listens_elsewhere_if_told_so_and_answers_for_addresses_and_the_machines_name(tmp_path):
    port = free_port()
    with open_sinks(config(prometheus_port=port, prometheus_host="127.0.0.3"), tmp_path):
        assert "spot_async_iterations" in scrape(port, host="127.0.0.3")
        with pytest.raises(urllib.error.URLError):
            scrape(port)
    with open_sinks(config(prometheus_port=port, prometheus_host="0.0.0.0"), tmp_path):
        for host, answered in (("10.2.3.4", True), (socket.gethostname(), True), ("metrics.evil.example", False)):
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": f"{host}:{port}"})
            if answered:
                assert b"spot_async_iterations" in urllib.request.urlopen(asked).read()
            else:
                with pytest.raises(urllib.error.HTTPError, match="403") as refused:
                    urllib.request.urlopen(asked)
                assert socket.gethostname() in refused.value.read().decode()


def test_a_port_that_is_taken_is_a_warning_at_the_start_and_at_the_end(tmp_path):
    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with open_sinks(config(prometheus_port=port), tmp_path, warn=said.append) as (sink,):
            sink.write(1, METRICS)
            sink.go_back([])
    first, last = said
    assert first.startswith(f"telemetry.prometheus_port={port} is lost, and the run continues without it: ")
    assert first.endswith("in use; choose another port")
    assert last.startswith(f"telemetry.prometheus_port={port} was lost during the run (")


@pytest.mark.parametrize(
    ("telemetry", "expected"),
    [
        ({"tensorboard": True}, "package tensorboardX is not installed: pip install tensorboardX"),
        ({"wandb": {"project": "p"}}, "package wandb is not installed: pip install wandb"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch, telemetry, expected):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_packages(TelemetryConfig.model_validate(telemetry))
    check_packages(TelemetryConfig())


def test_tensorboard_files_hold_every_metric_at_its_iteration(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with open_sinks(config(tensorboard=True), tmp_path) as sinks:
        for iteration in (1, 2):
            sinks[0].write(iteration, METRICS)
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = [
        (event.step, value.tag, value.simple_value)
        for event in map(Event.FromString, records(file.read_bytes()))
        for value in event.summary.value
        if value.tag != "custom_scalars__config__"
    ]
    assert found == [
        (i, tag, value) for i in (1, 2) for tag, value in (("rollout/accuracy", 0.25), ("evaluation/avg_8", 0.5))
    ]


def test_tensorboards_full_disk_is_one_line_and_one_at_the_end(tmp_path, capfd):
    said, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_sinks(config(tensorboard=True), tmp_path, warn=said.append) as (sink,):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        try:
            write_rows(sink, *range(1, 20))
            end = time.monotonic() + 60
            while not said:
                assert time.monotonic() < end
                time.sleep(0.01)
            write_rows(sink, *range(20, 40))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said == [
        "telemetry.tensorboard is lost, and the run continues without it: OSError: [Errno 27] File too large",
        "telemetry.tensorboard was lost during the run (OSError: [Errno 27] File too large); "
        "metrics.jsonl has everything",
    ]
    assert "Traceback" not in "".join(capfd.readouterr())


# What an asynchronous run writes: the evaluation of iteration 1 in the row of iteration 2.
BEFORE, LATE, AFTER = ({"evaluation/avg@8": share, "evaluation/hard/avg@8": share} for share in (0.1, 0.2, 0.4))


def write_asynchronous_run(sink):
    sink.write(0, BEFORE)
    sink.write(1, {"loss": 1.0})
    sink.write(2, {"loss": 2.0, "evaluation/iteration": 1.0, **LATE})
    sink.write(3, {"loss": 3.0})
    sink.conclude(3, AFTER)


def test_tensorboard_shows_held_out_figures_at_the_iteration_whose_weights_were_measured(tmp_path):
    with open_sinks(config(tensorboard=True), tmp_path) as (sink,):
        write_asynchronous_run(sink)
    for tag in ("evaluation/avg_8", "evaluation/hard/avg_8"):
        assert shown_steps(tmp_path / "tensorboard", tag) == [0, 1, 3]
    assert shown_steps(tmp_path / "tensorboard", "loss") == [1, 2, 3]


@pytest.mark.long
def test_wandb_draws_held_out_figures_over_the_iteration_whose_weights_were_measured(tmp_path):
    with open_sinks(config(wandb={"project": "p"}), tmp_path) as (sink,):
        write_asynchronous_run(sink)
    (directory,) = tmp_path.glob("wandb/offline-run-*")
    records = wandb_run_records(directory)
    steps = [
        (each["_step"], each["evaluation/iteration"], each["evaluation/avg@8"], each["evaluation/hard/avg@8"])
        for each in wandb_items(records)
        if "evaluation/avg@8" in each
    ]
    assert steps == [(0, 0, 0.1, 0.1), (1, 1, 0.2, 0.2), (3, 3, 0.4, 0.4)]
    assert ("evaluation/*", "evaluation/iteration") in {(r.metric.glob_name, r.metric.step_metric) for r in records}
    summary = {item.key: item.value_json for each in records for item in each.summary.update}
    assert summary["evaluation/avg@8"] == "0.4"


def test_wandb_gets_the_last_evaluation_where_the_last_row_has_one_of_earlier_weights(tmp_path):
    with open_sinks(config(wandb={"project": "p"}), tmp_path) as (sink,):
        sink.write(2, {"loss": 2.0, "evaluation/iteration": 1.0, **LATE})
        sink.conclude(2, AFTER)
    (directory,) = tmp_path.glob("wandb/offline-run-*")
    found = wandb_items(wandb_run_records(directory))
    assert [(each["evaluation/iteration"], each["evaluation/avg@8"]) for each in found] == [(1, 0.2), (2, 0.4)]


def test_prometheus_shows_the_last_evaluation_beside_the_last_iteration(tmp_path):
    port = free_port()
    with open_sinks(config(prometheus_port=port), tmp_path) as (sink,):
        write_asynchronous_run(sink)
        run = f'run="{tmp_path.name}"'
        text = scrape(port, f'evaluation_avg_8{{{run},set=""}} 0.4')
    for line in (f"iterations_total{{{run}}} 3.0", f'loss{{of="",{run}}} 3.0'):
        assert f"spot_async_{line}" in text


@pytest.fixture
def event_files(tmp_path):
    """Those of a run that went back, and was resumed within a second."""
    with open_sinks(config(tensorboard=True), tmp_path) as (sink,):
        write_rows(sink, 1, 2, 3, 4)
        sink.go_back(rows(1, 2, 3))  # within one run
        write_rows(sink, 4, 5)
    with open_sinks(config(tensorboard=True), tmp_path) as (sink,):
        sink.go_back(rows(1, 2))
        write_rows(sink, 3, 4)
    return tmp_path / "tensorboard"


def test_tensorboard_itself_shows_each_iteration_once(event_files):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(event_files))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_wandb_goes_on_with_its_run_and_has_each_iteration_once(tmp_path):
    wandb = {"project": "p"}
    with open_sinks(config(wandb=wandb), tmp_path) as (sink,):
        write_rows(sink, 1, 2, 3, 4)
        sink.go_back(rows(1, 2))  # within one run
        write_rows(sink, 3, 4, 5)
    (first,) = tmp_path.glob("wandb/offline-run-*")
    aside = first.rename(tmp_path / "first")  # W&B names directories by the second
    with open_sinks(config(wandb=wandb), tmp_path) as (sink,):
        sink.go_back(rows(1, 2, 3))  # of a resumed run, whose earlier part is nowhere but here
        write_rows(sink, 4, 5)
    (second,) = tmp_path.glob("wandb/offline-run-*")
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    for each in (aside, second):
        found = [(row["_step"], row["loss"]) for row in wandb_items(wandb_run_records(each))]
        assert found == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]


def wandb_run_records(directory):
    """What an offline run wrote, once its service has written its end."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("*.wandb")
    end, found = time.monotonic() + 60, []
    while not any(each.HasField("exit") for each in found):
        assert time.monotonic() < end
        found = [Record.FromString(each) for each in wandb_records(file.read_bytes())]
    return found


def wandb_items(records):
    """The metrics of each step, `_step` among them."""
    found = [{item.nested_key[0]: json.loads(item.value_json) for item in each.history.item} for each in records]
    return [each for each in found if each]


def wandb_records(data):
    """Payloads of a file in LevelDB's log format: blocks of parts, each with a checksum, its length and its place."""
    whole, part, last, blocks = 1, b"", 4, [data[at : at + 32768] for at in range(0, len(data), 32768)]
    for number, block in enumerate(blocks):
        at = 0 if number else 7  # the file's own header
        while at + 7 <= len(block):
            length, place = struct.unpack("<HB", block[at + 4 : at + 7])
            if at + 7 + length > len(block):
                return  # it is being written
            part += block[at + 7 : at + 7 + length]
            at += 7 + length
            if place in (whole, last):
                yield part
                part = b""


def rows(*iterations):
    return [{"iteration": each, "time": 0.0, "loss": float(each)} for each in iterations]


def write_rows(sink, *iterations):
    for each in iterations:
        sink.write(each, {"loss": float(each)})


def test_wandb_gets_the_metrics_the_configuration_and_the_name_of_the_run(tmp_path):
    directory = tmp_path / "my-run"
    directory.mkdir()
    with open_sinks(config(wandb={"project": "p"}), directory) as sinks:
        sinks[0].write(7, METRICS)
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while b"evaluation/avg@8" not in file.read_bytes():  # its service writes a moment after the run's end
        assert time.monotonic() < end
        time.sleep(0.05)
    assert b"my-run" in file.read_bytes()
    assert b"learning_rate" in file.read_bytes()


def test_wandb_prints_no_trace_of_a_run_that_ends_early(tmp_path, capfd):
    """Why it does is the command's to say, in one line."""
    with (
        pytest.raises(asyncio.CancelledError),
        open_sinks(config(wandb={"project": "p"}), tmp_path),
    ):
        raise asyncio.CancelledError
    assert "".join(capfd.readouterr()) == ""


LOSES_ITS_HELPER = """
import os, signal, subprocess, sys
from pathlib import Path
from spot_async.config import WandbConfig
from spot_async.telemetry import side_sink
from spot_async.telemetry.side_sink import SideSink
from spot_async.telemetry.sinks import abandon_wandb, wandb_run

side_sink.FINISH_TIMEOUT_S = 2.0
opened = wandb_run(WandbConfig(project="p"), Path(sys.argv[1]), {})
with SideSink("wandb", opened, print, abandon=abandon_wandb) as sink:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "wandb-core"], capture_output=True, text=True)
    helper = int(found.stdout)
    os.kill(helper, signal.Signals[sys.argv[2]])
    for iteration in range(1, 50):
        sink.write(iteration, {"loss": 1.0})
print("the run continued", helper, flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_a_run_outlives_wandbs_helper_and_exits_without_a_trace(tmp_path, how):
    argv = [sys.executable, "-c", LOSES_ITS_HELPER, str(tmp_path), how]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # this process's
    with (tmp_path / "output").open("w+") as output:  # a pipe would be held open by a helper that is stopped
        subprocess.run(argv, stdout=output, stderr=output, env=environment, timeout=60, check=True)
        output.seek(0)
        said = output.read().splitlines()
    if how == "SIGSTOP":
        os.kill(int(said[-1].split()[-1]), signal.SIGKILL)
    lost, sum_up, last = (line for line in said if "sink lost" not in line and not line.startswith("wandb: "))
    assert lost.startswith("wandb is lost, and the run continues without it: ")
    assert sum_up.startswith("wandb was lost during the run (")
    assert last.startswith("the run continued")


@pytest.fixture
def variables_of_wandb(monkeypatch):
    """W&B reads them once: let it do so again for a test, and afterwards."""
    import wandb

    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def test_wandbs_own_variables_say_who_and_how(tmp_path, variables_of_wandb):
    import wandb

    variables_of_wandb.setenv("WANDB_ENTITY", "a-team")
    variables_of_wandb.setenv("WANDB_NAME", "a-name")
    with open_sinks(config(wandb={"project": "p"}), tmp_path):
        assert (wandb.run.entity, wandb.run.project, wandb.run.name) == ("a-team", "p", "a-name")
    wandb.teardown()
    variables_of_wandb.setenv("WANDB_MODE", "disabled")
    (tmp_path / "none").mkdir()
    with open_sinks(config(wandb={"project": "p"}), tmp_path / "none") as (sink,):
        write_rows(sink, 1, 2)
    assert not [*tmp_path.glob("none/wandb/*run-*")]
    wandb.teardown()
    variables_of_wandb.setenv("WANDB_MODE", "ofline")
    wrong = pytest.raises(ConfigError, match=r"^telemetry\.wandb: WANDB_MODE: Input should be 'online', 'offline'")
    with wrong, open_sinks(config(wandb={"project": "p"}), tmp_path):
        pass


def test_wandb_without_a_key_is_one_line(tmp_path, variables_of_wandb, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with (
        pytest.raises(ConfigError, match=r"telemetry.wandb: .*\(or set WANDB_MODE=offline\)$"),
        open_sinks(config(wandb={"project": "p"}), tmp_path),
    ):
        pass


def test_events_go_to_the_run_only_while_it_lasts(tmp_path):
    with log_events_to(tmp_path / "run.jsonl"):
        structlog.get_logger().info("inside", answer=42)
    with structlog.testing.capture_logs() as captured:
        structlog.get_logger().info("outside")
    assert [event["event"] for event in captured] == ["outside"]
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(line)["answer"] == 42


@pytest.mark.parametrize(("every", "written"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
def test_samples_are_written_as_often_as_configured_and_metrics_always(tmp_path, every, written):
    directory = RunDirectory(tmp_path)
    stages = SimpleNamespace(all=(), tokens_generated=0)
    log = RunLog(directory, stages, samples_every=every)
    sample = Sample(supervision=None, metrics={"mine/kept": 0.5}, record={"problem_id": "p"})
    for iteration in (1, 2, 3, 4):
        log.on(finished_iteration(iteration, [sample], loss=0.5))

    def iterations(name):
        path = tmp_path / name
        return [json.loads(line)["iteration"] for line in path.read_text().splitlines()] if path.exists() else []

    assert iterations("samples.jsonl") == written
    lines = (tmp_path / "samples.jsonl").read_text().splitlines() if written else []
    assert all(json.loads(line)["metrics"] == {"mine/kept": 0.5} for line in lines)
    assert iterations("metrics.jsonl") == [1, 2, 3, 4]


def test_the_figures_of_the_first_iteration_are_its_own(tmp_path):
    """Failed requests took their time too, and the loop's lag at the start is none of the iteration's."""
    counters = StageCounters()
    stage = SimpleNamespace(name="verify", counters=counters)
    lag = LoopLag()
    lag.add(9.0)
    log = RunLog(RunDirectory(tmp_path), SimpleNamespace(all=(stage,), tokens_generated=0), (), RunMeters(loop_lag=lag))
    counters.completed, counters.failed, counters.ended, counters.busy_s = 3, 1, 4, 2.0
    log.on(finished_iteration(1))
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["stage/verify/mean_latency_s"] == 0.5
    assert row["loop/lag_max_s"] == 0.0
