"""Supervised children: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_trees import gone, is_alive

from spot_async.base.processes.child import ChildProcess, standing_still, tree_cpu_s
from spot_async.errors import ProcessDiedError

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True); time.sleep(600)"
)
FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True); time.sleep(600)"
)


async def start(tmp_path, code):
    return await ChildProcess.start("server", [sys.executable, "-c", code], log_path=tmp_path / "server.log")


async def printed(child):
    while not child.log_tail():  # noqa: ASYNC110 - a log file tells nobody that it grew
        await asyncio.sleep(0.01)
    return child.log_tail().strip()


async def test_stopping_ends_the_whole_group_even_one_that_ignores_sigterm(tmp_path):
    child = await start(tmp_path, STUBBORN)
    await printed(child)
    watching = asyncio.create_task(child.watch())
    started = time.monotonic()
    await child.stop(grace_s=0.2)
    assert time.monotonic() - started < 5  # that it is given if nothing is said
    await watching  # stopped on purpose: no error
    await child.stop()

    family = await start(tmp_path / "family", FAMILY)
    grandchild = int(await printed(family))
    await family.stop()
    assert not is_alive(family.pid)
    assert await gone([grandchild])


async def test_the_cpu_time_of_a_tree_is_counted(tmp_path):
    busy = (
        "import time; t = time.process_time()\nwhile time.process_time() < t + 0.5: pass\nprint('done', flush=True)\n"
    )
    child = await start(tmp_path, busy + "time.sleep(600)")
    await printed(child)
    assert 0.4 < tree_cpu_s(child.pid) < 5
    await child.stop()


ENDLESS = """
import sys, threading
from spot_async.base.processes.exits import exit_at_once
sys.excepthook = exit_at_once
threading.Thread(target=threading.Event().wait).start()  # the end of the interpreter waits for it
raise MemoryError("none left")
"""


async def test_who_exits_at_once_waits_for_no_thread_and_says_why(tmp_path):
    async with asyncio.timeout(60):
        with pytest.raises(ProcessDiedError, match="exited with code 1: MemoryError: none left"):
            await (await start(tmp_path, ENDLESS)).watch()


def test_a_process_that_somebody_stopped_is_named_and_a_rank_by_its_number():
    waiting = "import time; print(flush=True); time.sleep(600)"
    as_rank = f"from spot_async.base.processes.exits import show_rank; show_rank(); {waiting}"
    environment = {**os.environ, "RANK": "3"}
    rank, other = (
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for code in (as_rank, waiting)
    )
    try:
        for each in (rank, other):
            each.stdout.read(1)
            os.kill(each.pid, signal.SIGSTOP)
            os.waitpid(each.pid, os.WUNTRACED)
        name = Path(sys.executable).name
        assert {*standing_still(os.getpid())} == {
            f"rank 3 (pid {rank.pid}) is STOPPED by a signal",
            f"{name} (pid {other.pid}) is STOPPED by a signal",
        }
    finally:
        for each in (rank, other):
            each.kill()
            each.communicate()
