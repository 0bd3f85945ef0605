"""How a run that stalled ends: its exit code, its report, and no process that is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from command import Command
from problem_files import FEW

from spot_async.base.tasks import root_cause
from spot_async.cli import ending, exit_code
from spot_async.errors import BudgetSpentError, ConfigError, ProcessDiedError, StalledError
from spot_async.loop.events import StepBegan
from spot_async.run_directory.layout import RunDirectory
from spot_async.watchdog.monitor import Watchdog

TIMEOUT_S = 900.0
STALL_S = 5  # of a real run


def test_every_way_to_end_has_its_code():
    assert exit_code(StalledError("")) == 3
    assert exit_code(BudgetSpentError("")) == 4
    assert exit_code(ConfigError("")) == 2
    assert exit_code(ProcessDiedError("")) == 1
    bug_on_cancelling = BaseExceptionGroup("", [RuntimeError("not ready to be cancelled"), StalledError("stalled")])
    assert isinstance(root_cause(bug_on_cancelling), StalledError)


def test_a_cancellation_that_nobody_asked_for_ends_with_its_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "tune_gc", lambda **given: None)

    async def forgotten():
        future = asyncio.get_running_loop().create_future()
        future.cancel("where it was cancelled")
        await future

    with pytest.raises(asyncio.CancelledError, match="where it was cancelled"):
        ending.run_until_stopped(forgotten(), RunDirectory(tmp_path))


HANGING = """
    import asyncio, os, sys, time
    from pathlib import Path
    from spot_async.cli import ending
    from spot_async.cli.ending import hung
    from spot_async.base.tasks import (alongside, in_thread)
    from spot_async.base.processes.child import ChildProcess
    from spot_async.base.processes.exits import exit_with_parent
    from spot_async.run_directory.layout import RunDirectory
    from spot_async.watchdog import monitor
    from typing import get_args
    from spot_async.loop.events import Phase

    async def main(how, folder):
        child = await ChildProcess.start("child", [sys.executable, __file__, "child"], log_path=folder / "child.log")
        monitor.BEAT_S, monitor.COME_DOWN_S, monitor.TELL_S, ending.LAST_WORDS_S = 0.1, 0.5, 2.0, 2.0
        if how in BLOCKING:  # else a busy machine that writes the report passes for a blocked loop
            monitor.BLOCKED_AFTER_S = 0.3
        print(child.pid, flush=True)
        limits = dict.fromkeys([None, *get_args(Phase)], 1.0)
        with monitor.Watchdog(limits, folder, exit_process=hung(RunDirectory(folder))) as watchdog:
            async with alongside(watchdog.watch):
                await how()

    async def block_the_loop():
        time.sleep(1000)

    async def refuse_to_end():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

    def write_to_disk():
        (Path(sys.argv[2]) / "disk").write_text("")  # a FIFO that nobody reads

    async def wait_for_a_disk():
        write_to_disk()

    async def wait_for_a_disk_in_a_thread():
        await in_thread(write_to_disk)

    async def hang_when_it_closes():
        try:
            await asyncio.Event().wait()
        finally:
            write_to_disk()

    async def print_to_a_blocked_screen():
        print("x" * 10_000_000)

    BLOCKING = (block_the_loop, wait_for_a_disk, print_to_a_blocked_screen)
    if sys.argv[1] == "child":
        exit_with_parent()
        time.sleep(1000)
    asyncio.run(main(globals()[sys.argv[1]], Path(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        ("block_the_loop", r"the event loop is blocked at .*hanging.py:\d+ in block_the_loop"),
        ("refuse_to_end", r"the run has been start for \d+ s"),
    ],
)
def test_what_cannot_be_ended_in_order_is_ended_with_its_children(tmp_path, how, culprit):
    script = tmp_path / "hanging.py"
    script.write_text(textwrap.dedent(HANGING))
    done = subprocess.run([sys.executable, script, how, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    line, saved = done.stderr.splitlines()
    assert re.match(rf"error: the run stalled: nothing was committed for \d+ s, and {culprit}", line)
    assert saved.startswith("nothing was trained yet")
    report = (tmp_path / "stall-report.txt").read_text()
    assert "hanging.py (pid " in report.split("Processes below this one")[1]
    assert 'hanging.py", line' in report.split("Threads")[1]
    end = time.monotonic() + 60
    while Path(f"/proc/{done.stdout.strip()}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        pytest.param("wait_for_a_disk", r"the event loop is blocked at .*pathlib.*", marks=pytest.mark.long),
        pytest.param(
            "wait_for_a_disk_in_a_thread",
            r"the run has been start for \d+ s; a thread is at .*pathlib.*",
            marks=pytest.mark.long,
        ),
        pytest.param("hang_when_it_closes", r"the run has been start for \d+ s", marks=pytest.mark.long),
    ],
)
def test_a_disk_that_hangs_ends_the_run_and_the_report_is_written_elsewhere(tmp_path, how, culprit):
    script = tmp_path / "hanging.py"
    script.write_text(textwrap.dedent(HANGING))
    os.mkfifo(tmp_path / "disk")
    os.mkfifo(tmp_path / "stall-report.txt")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "TMPDIR": str(elsewhere)}
    command = [sys.executable, script, how, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 3, done.stderr
    line, _ = done.stderr.splitlines()[-2:]
    pattern = rf"error: the run stalled: nothing was committed for \d+ s, and {culprit}; see (.*)"
    found = re.match(pattern, line)
    assert found is not None, line
    report = Path(found[1])
    assert report.parent == elsewhere
    assert "in write_to_disk" in report.read_text() or how == "hang_when_it_closes"


@pytest.mark.long
def test_a_screen_that_takes_nothing_does_not_keep_a_stalled_run_alive(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(textwrap.dedent(HANGING))
    unread, screen = os.pipe()
    try:
        command = [sys.executable, script, "print_to_a_blocked_screen", tmp_path]
        done = subprocess.run(command, stdout=screen, stderr=screen, timeout=300)
    finally:
        os.close(unread)
        os.close(screen)
    assert done.returncode == 3
    report = (tmp_path / "stall-report.txt").read_text()
    assert re.search(r"blocked at .*hanging.py:\d+ in print_to_a_blocked_screen \(the screen does not answer\)", report)


WAITING = """
    import asyncio
    from spot_async.config import PluginSettings
    from spot_async.types import PolicyNeeds

    class WaitingPolicy:
        Settings = PluginSettings
        needs = PolicyNeeds()  # no teacher

        def __init__(self, settings, context):
            pass

        async def supervise(self, prompt, stages):
            await asyncio.Event().wait()
"""


@pytest.mark.long
def test_a_run_whose_policy_waits_for_ever_ends_with_code_3_a_report_and_no_process_left(tmp_path, monkeypatch):
    (tmp_path / "waiting.py").write_text(textwrap.dedent(WAITING))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = tmp_path / "run"
    command = Command(
        *["train", "configs/quickstart.yaml", f"run.directory={run}", FEW, "policy=waiting:WaitingPolicy"],
        *["evaluation=null", "run.verdict_every_s=2", f"run.stall_timeout_s={STALL_S}"],
        "stages.timeout_s=1",
        *[f"{role}.serving.recovery_timeout_s=1" for role in ("student", "teacher")],
        *[f"{role}.serving.restarts=0" for role in ("student", "teacher")],
    )
    code, out, err = command.finish()
    assert code == 3, err
    line, saved = err.splitlines()
    assert re.match(r"error: the run stalled: nothing was committed for \d+ s, and prompt 0 \(problem ", line)
    assert f"waiting.py:14 in WaitingPolicy.supervise; see {run / 'stall-report.txt'}" in line
    assert saved.startswith("nothing was trained yet")
    assert "Policy bound: the trainer waited 100 % of the time, and no stage had anything to do" in out
    text = (run / "stall-report.txt").read_text()
    assert "prompts: 64 running, 0 queued" in text
    assert "spot_async.serving (pid " in text.split("Processes below this one")[1]
    assert f"End of {run / 'logs' / 'student.log'}" in text
    command.assert_nothing_left()


def test_sigquit_writes_the_report_and_the_run_goes_on(tmp_path):
    async def main():
        with Watchdog(None, tmp_path, exit_process=pytest.fail) as watchdog:
            watchdog.on(StepBegan("training with opd"))
            os.kill(os.getpid(), signal.SIGQUIT)
            await asyncio.sleep(0.05)
        return signal.getsignal(signal.SIGQUIT)

    assert asyncio.run(main()) is signal.SIG_DFL
    report = (tmp_path / "stall-report.txt").read_text()
    assert report.startswith("What a run does right now, as asked for by SIGQUIT")
    assert "It waits for this: the run has been training with opd for 0 s." in report
    assert "Phase: training with opd." in report
    assert "main" in report.split("Tasks")[1]
