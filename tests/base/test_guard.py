"""Whatever ends first, no process of a foreign program is left. Real processes, some in sessions of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_trees import DEPTH, gone, is_alive, orchestrated, printed, write_server

from spot_async.base.processes.child import ChildProcess, log_lines
from spot_async.errors import ProcessDiedError

# A program that is killed while it holds shared memory. Its resource tracker is the one to free it.
HOLDER = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=64).name, flush=True)
time.sleep(600)
"""

# A guard that believes to be on a system without prctl, /proc and `sigtimedwait`.
ELSEWHERE = """
import signal, sys
from spot_async.base.processes import guard
sys.platform = "darwin"
del signal.sigtimedwait
guard.process_tree = lambda root: {}
own = guard.Guard(sys.argv[2:])
guard.end_as(own.run(float(sys.argv[1])))
"""


@pytest.fixture
def server(tmp_path):
    return write_server(tmp_path)


async def start(server, *arguments, name="server"):
    """The guarded server, and the pids of everything below the guard."""
    child = await ChildProcess.start_foreign(
        name, [sys.executable, str(server), *arguments], log_path=server.with_name(f"{name}.log")
    )
    return child, await printed(child.log_path, DEPTH + 1)


async def test_a_stop_reaches_orphans_and_sessions_of_their_own(server):
    child, pids = await start(server, str(DEPTH), "polite")
    assert all(map(is_alive, (pids[0], pids[2])))
    watching = asyncio.create_task(child.watch())
    await child.stop()
    await watching  # on purpose: no error
    assert not any(map(is_alive, [*pids, child.pid]))


async def test_what_ignores_sigterm_is_killed_with_all_below_it(server, monkeypatch):
    monkeypatch.setattr("spot_async.base.processes.child.FOREIGN_GRACE_S", 0.5)
    child, pids = await start(server, str(DEPTH), "stubborn")
    started = time.monotonic()
    await child.stop()
    assert 0.5 <= time.monotonic() - started < 15  # which it would be without the patch
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("manner", "grace_s", "ends_by"), [("polite", 600, "SIGTERM"), ("stubborn", 0.2, "SIGKILL")])
async def test_elsewhere_than_on_linux_a_stop_ends_the_program_alone(server, manner, grace_s, ends_by):
    argv = [sys.executable, "-c", ELSEWHERE, str(grace_s), sys.executable, str(server), "0", manner]
    child = await ChildProcess.start("guard", argv, log_path=server.with_name("log"))
    (pid,) = await printed(child.log_path, 1)
    os.kill(child.pid, signal.SIGTERM)
    with pytest.raises(ProcessDiedError, match=rf"guard \(pid {child.pid}\) was killed by {ends_by} \(log: .*log\)"):
        await child.watch()
    assert not is_alive(pid)


async def test_shared_memory_of_what_had_to_be_killed_is_freed(tmp_path, monkeypatch):
    monkeypatch.setattr("spot_async.base.processes.child.FOREIGN_GRACE_S", 0.2)
    child = await ChildProcess.start_foreign("holder", [sys.executable, "-c", HOLDER], log_path=tmp_path / "log")
    while not (name := child.log_tail().strip()):  # noqa: ASYNC110 - a log tells nobody that it grew
        await asyncio.sleep(0.02)
    held = Path("/dev/shm") / name
    assert held.exists()
    await child.stop()
    assert not held.exists()


async def test_a_server_that_is_killed_takes_its_workers_along_and_is_named_with_its_signal(server):
    child, pids = await start(server, str(DEPTH), "polite")
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match=rf"server \(pid {child.pid}\) was killed by SIGKILL"):
        await child.watch()
    assert not any(map(is_alive, pids))


async def test_a_program_that_fails_passes_on_its_code_and_last_words(tmp_path):
    argv = [sys.executable, "-c", "import sys; sys.exit('error: no such model')"]
    child = await ChildProcess.start_foreign("server", argv, log_path=tmp_path / "log")
    with pytest.raises(ProcessDiedError, match="exited with code 1: error: no such model"):
        await child.watch()
    absent = await ChildProcess.start_foreign("server", [str(tmp_path / "absent")], log_path=tmp_path / "log")
    with pytest.raises(ProcessDiedError, match="No such file or directory"):
        await absent.watch()


async def test_a_guard_that_hangs_or_is_killed_does_not_keep_the_server_running(server, monkeypatch):
    monkeypatch.setattr("spot_async.base.processes.child.FOREIGN_GRACE_S", 0.2)
    monkeypatch.setattr("spot_async.base.processes.child.GUARD_MARGIN_S", 0.2)
    hanging, pids = await start(server, str(DEPTH), "polite")
    os.kill(hanging.pid, signal.SIGSTOP)
    await hanging.stop()
    assert await gone(pids)

    killed, pids = await start(server, str(DEPTH), "polite", name="killed")
    os.kill(killed.pid, signal.SIGKILL)
    assert await gone(pids[-1:])  # the server; of workers in other sessions nobody knows then
    os.kill(pids[0], signal.SIGKILL)


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
async def test_nothing_outlives_an_orchestrator_that_is_killed(server, manner):
    async with orchestrated(server, manner) as (guard, pids):
        pass
    assert await gone([guard, *pids])


STOPPED_TWICE = """
import asyncio, os, signal, sys
from pathlib import Path
from spot_async.cli.ending import run_until_stopped
from spot_async.base.processes.child import ChildProcess
from spot_async.run_directory.layout import RunDirectory

async def main():
    server = Path(sys.argv[1])
    argv = [sys.executable, str(server), *sys.argv[2:]]
    await ChildProcess.start_foreign("server", argv, log_path=server.with_name("server.log"))
    print("started", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        print("stopping", flush=True)
        await asyncio.sleep(600)  # takes its time

run_until_stopped(main(), RunDirectory(Path(sys.argv[1]).parent))
"""


async def test_a_second_ctrl_c_ends_a_run_at_once_says_what_is_saved_and_leaves_nothing(server):
    process = subprocess.Popen(  # noqa: ASYNC220 - ended below
        [sys.executable, "-c", STOPPED_TWICE, str(server), str(DEPTH), "polite"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    pids = await printed(server.with_name("server.log"), DEPTH + 1)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("SIGINT: stopping")
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == f"stopped at once by SIGINT\nnothing was trained yet; logs are in {server.parent}\n"
    assert await gone(pids)


async def test_a_foreign_interpreter_sees_its_own_modules_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "ours"))
    monkeypatch.setenv("KEPT", "kept")
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ.get('SPOT_ASYNC_PARENT'), os.environ['KEPT'])"
    for given, expected in (({}, "None None kept"), ({"PYTHONPATH": "theirs"}, "theirs None kept")):
        log = tmp_path / expected
        child = await ChildProcess.start_foreign("s", [sys.executable, "-c", code], log_path=log, environment=given)
        with pytest.raises(ProcessDiedError, match="exited with code 0"):
            await child.watch()
        assert log.read_text().strip() == expected


async def test_last_lines_are_readable_whatever_a_progress_bar_and_colours_left(tmp_path):
    written = r"import sys; sys.stdout.write('\x1b[36mfirst\x1b[0m\n\n  1%\r 50%\r100% loaded\r\nlast\r\n')"
    child = await ChildProcess.start_foreign("s", [sys.executable, "-c", written], log_path=tmp_path / "log")
    with pytest.raises(ProcessDiedError):
        await child.watch()
    assert log_lines(child.log_path, 10) == ["first", "100% loaded", "last"]
    assert log_lines(child.log_path, 2) == ["100% loaded", "last"]
