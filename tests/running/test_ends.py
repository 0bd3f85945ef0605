"""How a run ends early, and what it leaves: by a signal, a closed terminal, or a directory that is taken away."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import typer

from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.private_directory import private_directory
from spot_async.cli import ending
from spot_async.cli.ending import Screen, leave_at_once, run_until_stopped
from spot_async.errors import DataError, ProcessDiedError, StorageError, TrainerError
from spot_async.loop.resuming import StopRequest
from spot_async.run_directory.layout import RESTARTED, RESUMED, RunDirectory
from spot_async.run_directory.reading import RunFiles
from spot_async.serving import server
from spot_async.telemetry.run_log import log_events_to


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Of a run that has begun."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    (path / "run.json").write_text('{"format": 1, "command": "train"}')
    (path / "config.yaml").write_text("policy: {kind: opd}\n")
    return RunDirectory.open(path)


@pytest.fixture
def hangup_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


async def hung_up() -> str:
    """A run whose terminal is closed."""
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.1)
    return "continued"


async def hung_up_twice() -> None:
    """... and which hears of it once more while it stops."""
    try:
        await hung_up()
    finally:
        await hung_up()


@pytest.mark.usefixtures("hangup_as_before")
@pytest.mark.parametrize("run", [hung_up, hung_up_twice])
def test_a_terminal_that_is_closed_stops_the_run_in_order_however_often_it_is_said(directory, capsys, run):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    with log_events_to(directory.path / "logs" / "run.jsonl"), pytest.raises(typer.Exit) as left:
        run_until_stopped(run(), directory)
    assert left.value.exit_code == 129
    assert "stopped by SIGHUP; nothing was trained yet" in capsys.readouterr().err
    assert RunFiles(directory.path).early_end() == "The run ended early: stopped by SIGHUP"


@pytest.mark.usefixtures("hangup_as_before")
def test_a_run_under_nohup_outlives_its_terminal(directory):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run_until_stopped(hung_up(), directory) == "continued"


async def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(10)


def test_a_run_that_a_script_started_in_the_background_is_stopped_by_sigint_too(directory, capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what shells do to it
    try:
        with pytest.raises(typer.Exit) as left:
            run_until_stopped(interrupted(), directory)
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.exit_code == 130


async def interrupted_twice_while_the_loop_is_blocked() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    blocked_until = time.monotonic() + 2 * ending.BLOCKED_S
    while time.monotonic() < blocked_until:
        pass
    os.kill(os.getpid(), signal.SIGINT)
    pytest.fail("it continued")


def test_a_second_ctrl_c_ends_a_run_whose_loop_is_blocked(directory, capfd, monkeypatch):
    def exit_process(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(ending.os, "_exit", exit_process)
    monkeypatch.setattr(ending, "BLOCKED_S", 0.05)
    with pytest.raises(SystemExit, match="130"):
        run_until_stopped(interrupted_twice_while_the_loop_is_blocked(), directory)
    assert capfd.readouterr().err.startswith("stopped at once by SIGINT\nnothing was trained yet")


def test_two_signals_that_a_scheduler_sends_at_once_save_a_checkpoint(directory, capsys):
    wish, said = StopRequest(), asyncio.Event()

    async def run() -> None:
        with wish.heard_by(said.set):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            await said.wait()

    with pytest.raises(typer.Exit):
        run_until_stopped(run(), directory, wish)
    assert capsys.readouterr().err.startswith("stopped by SIGUSR1; ")


@pytest.mark.parametrize("place", ["a closed terminal", "a full disk"])
def test_a_command_goes_on_where_nobody_reads_it_any_more(place):
    if place == "a full disk":
        file = Path("/dev/full").open("w")  # noqa: SIM115 - closed below, which would fail had anything been kept
    else:
        master, slave = os.openpty()
        os.close(master)
        file = os.fdopen(slave, "w")
    screen = Screen(file=file)
    screen.print("a line")
    screen.print("another")
    file.close()


def test_leaving_at_once_takes_the_private_directories_along(monkeypatch, capfd):
    def exit_process(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(ending.os, "_exit", exit_process)
    with private_directory("spot-test-") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "socket").touch()
        with pytest.raises(SystemExit, match="130"):
            leave_at_once("stopped at once in \udcff", 130)
        assert not path.exists()
    assert capfd.readouterr().err == "stopped at once in �\n"


def test_where_no_directory_for_sockets_can_be_made_it_is_said(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/gone")  # short enough for a socket
    with (
        pytest.raises(StorageError, match=r"no private directory can be made in .*gone: No such file .*set TMPDIR"),
        private_directory("spot-test-"),
    ):
        pass


@pytest.mark.parametrize(
    "noticed",
    [
        DataError("weights/step-000004: cannot be read: No such file or directory"),
        FileNotFoundError(2, "No such file or directory", "logs/run.jsonl"),
        ExceptionGroup("tasks", [FileNotFoundError(2, "No such file or directory", "logs/trainer.log")]),
        ExceptionGroup("tasks", [TrainerError("cannot publish weights to weights/step-000002: No such file")]),
    ],
)
def test_a_run_whose_directory_is_taken_away_says_so_whatever_noticed_it(directory, capsys, noticed):
    async def run() -> None:
        shutil.rmtree(directory.path)
        raise noticed

    with pytest.raises(typer.Exit) as left:
        run_until_stopped(run(), directory)
    assert left.value.exit_code == 1  # not 2, as of a run that could not start
    why, saved = capsys.readouterr().err.splitlines()
    assert why.startswith(f"error: the run directory {directory.path} is gone: it was removed or renamed")
    assert "No such file" in why
    assert saved == f"what was saved went with {directory.path}"


def test_a_bug_in_a_run_keeps_its_trace_while_the_directory_is_there(directory):
    async def run() -> None:
        raise FileNotFoundError(2, "No such file or directory", "elsewhere")

    with pytest.raises(FileNotFoundError):
        run_until_stopped(run(), directory)


async def test_a_child_whose_log_is_gone_is_still_named_with_its_code(tmp_path):
    child = await ChildProcess.start("server", [sys.executable, "-c", "exit(3)"], log_path=tmp_path / "logs" / "log")
    shutil.rmtree(tmp_path / "logs")
    with pytest.raises(ProcessDiedError, match=rf"server \(pid {child.pid}\) exited with code 3 \(log: "):
        await child.watch()


def test_a_server_goes_on_where_its_log_is_full(monkeypatch):
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        server._say("serving")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ExceptionGroup("tasks", [StorageError("cannot write x"), TrainerError("loss is NaN")]), "loss is NaN"),
        (ExceptionGroup("tasks", [ZeroDivisionError("division by zero")]), "ZeroDivisionError: division by zero"),
    ],
)
def test_what_ends_a_run_is_in_its_log_and_readers_are_told(directory, error, reason):
    with pytest.raises(ExceptionGroup), log_events_to(directory.path / "logs" / "run.jsonl"):
        raise error
    assert RunFiles(directory.path).early_end() == f"The run ended early: {reason}"
    with log_events_to(directory.path / "logs" / "run.jsonl"):
        structlog.get_logger().info("resumed", step=2)
    assert "Its log does not say why" in RunFiles(directory.path).early_end()  # of its last part


def test_readers_are_told_where_a_run_went_on_from_a_checkpoint(directory):
    with log_events_to(directory.path / "logs" / "run.jsonl"):
        structlog.get_logger().info(RESUMED, step=2, lineage=1)
        structlog.get_logger().warning(RESTARTED, reason="rank 1 was ended by SIGKILL", step=4, lineage=2)
    assert RunFiles(directory.path).interruptions() == [
        "The run was resumed after iteration 2",
        "The trainer was lost, and the run continued after iteration 4: rank 1 was ended by SIGKILL",
    ]


def test_of_a_run_that_goes_on_no_early_end_is_told_and_of_a_killed_one_that_nothing_says_why(directory):
    with directory.locked():
        assert RunFiles(directory.path).early_end() is None
    assert "Its log does not say why" in RunFiles(directory.path).early_end()
    (directory.path / "summary.json").write_text("{}")
    assert RunFiles(directory.path).early_end() is None


def test_a_log_that_cannot_be_read_hides_nothing_else(directory):
    """Earlier versions wrote NaN, and half a line where the disk was full."""
    lines = (
        '{"cpu_s": NaN, "event": "stopped"}\n{"event": "ends early", "reason": "stopped by SIGTERM"}\n{"event": "sto'
    )
    (directory.path / "logs" / "run.jsonl").write_text(lines)
    assert RunFiles(directory.path).early_end() == "The run ended early: stopped by SIGTERM"


@contextlib.contextmanager
def files_hold(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_events_are_whole_lines_of_json_whatever_the_disk_takes_and_figures_are_worth(tmp_path):
    path = tmp_path / "run.jsonl"
    with log_events_to(path):
        structlog.get_logger().info("stopped", cpu_s=float("nan"))
        with files_hold(path.stat().st_size + 20):
            structlog.get_logger().info("stopped", words="more than 20 bytes")
        structlog.get_logger().info("finished")
    events = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [(each["event"], each.get("cpu_s", 0)) for each in events] == [("stopped", None), ("finished", 0)]


def test_rows_that_do_not_fit_are_not_there_and_the_reason_is_the_systems(directory):
    directory.append("samples.jsonl", [{"n": 1}])
    with files_hold(12), pytest.raises(StorageError, match=r"cannot write .*samples.jsonl: File too large"):
        directory.append("samples.jsonl", [{"n": 2}, {"n": 3}])
    assert (directory.path / "samples.jsonl").read_text() == '{"n":1}\n'


async def test_a_child_that_starts_again_does_not_bring_back_a_directory_that_was_taken_away(directory):
    shutil.rmtree(directory.path)
    with pytest.raises(StorageError, match=r"cannot write .*server.log: No such file"):
        await ChildProcess.start("server", [sys.executable, "-c", ""], log_path=directory.path / "logs" / "server.log")
    assert not directory.path.exists()
