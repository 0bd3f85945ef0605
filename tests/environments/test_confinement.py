"""Whatever runs in an episode: it reaches no other one, nothing is left of it, and the next turn is answered rightly.

Each attack runs in the episode's own process, which is worse than a tool's program is. They are tried as whoever runs
the tests and, by root, as a user without rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from played_worlds import count, opened, play, run
from process_trees import gone

from spot_async.errors import ConfigError, DeadlineExceededError, TransientError
from spot_async.models.episodes import Step
from spot_async.types import Problem

Marked = Callable[[], set[int]]
SUPPORT = Path(__file__).parents[1] / "support"
PYTHON = "/usr/bin/python3"  # one that every user may start
OTHER = Problem(id="p8", text="How few?", answer="")
FORGED = rb"""b'\n["result", {"texts": ["1"], "kind": "answer"}]\n{"answer": 1, "replayed_steps": 0}\n'"""
WRITE = """
import os
for fd in range(3, 300):
    try:
        for _ in range(64): os.write(fd, %s)
    except OSError: pass
"""
FORK = """
import os, time
if not os.fork():
    %s
    time.sleep(600)
"""
UNBOUND = "import ctypes, os\nos.setsid()\nctypes.CDLL(None).prctl(1, 0)\nwhile True: pass"
UNCOUNTED = "import os, time\nfor _ in range(300):\n    if not os.fork(): time.sleep(600)"
OWN = "import tempfile\nfile = tempfile.NamedTemporaryFile()\nfile.write(b'x')\nout = 1"
SEEN = "import os\nout = [name for name in os.listdir('/proc') if name.isdecimal()]"
ATTACKS = {  # the code, and the kind and the text of what is answered to it
    "forged replies": (WRITE % FORGED.decode(), "answer", ""),
    "two megabytes of replies": (WRITE % "b'x' * 2**15", "killed", "too much"),
    "prints": ("import sys\nprint('{}', flush=True)\nsys.stderr.write('{}\\n' * 99999)\nout = 5", "answer", "5"),
    "a gigabyte of prints": ("import os\nfor _ in range(1024): os.write(1, bytes(2**20))", "answer", ""),
    "a gigabyte of answer": ("out = '✓' * 2**29", "killed", "too much memory"),
    "a long answer": ("out = 'ab' * 2**20", "answer", r"b\n\.\.\.\na"),
    "memory": ("bytearray(2**40)", "killed", "too much memory"),
    "changed builtins": ("import builtins\nbuiltins.len = lambda _: 7\nout = len([])", "answer", "7"),
    "an exit": ("import os\nos._exit(0)", "killed", "its process ended"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "killed", "its process ended"),
    "sys.exit": ("import sys\nsys.exit(3)", "error", "SystemExit: 3"),
    "an endless loop": ("while True: pass", "killed", "it took longer than 3 s"),
    "a loop that does not die with its parent": (UNBOUND, "killed", "longer"),
    "a child": (FORK % "pass", "answer", ""),
    "a child with a session": (FORK % "os.setsid()", "answer", ""),
    "an orphan": (FORK % "os.setsid(); os.fork() and os._exit(0)", "answer", ""),
    "a program": ("import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)", "answer", ""),
    "forks": (UNCOUNTED, "answer|error|killed", ""),  # as many as the user may have
    "killing all": ("import os\nos.kill(-1, 9)", "answer|error", ""),
    "files": (f"open({str(SUPPORT / 'written')!r}, 'w')", "error", "Read-only file system|Permission denied"),
    "files beside": ("open('written', 'w')", "error", "Read-only file system|Permission denied"),
    "files of its own": (OWN, "answer", "1"),
    "too many files": ("held = [open('/dev/null') for _ in range(1000)]", "error", "Too many open files"),
    "mounts": ("import ctypes\nout = ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, None)", "answer", "-1"),
    "other processes": (SEEN, "answer", r'\["1"\]'),
}


def wrapped(tmp_path: Path, *command: str) -> str:
    """An interpreter that is started by a command; skips where that starts nothing."""
    if shutil.which(command[0]) is None or not Path(PYTHON).exists():
        pytest.skip(f"no {command[0]}, or no {PYTHON}")
    script = tmp_path / "python"
    words = " ".join(command)
    script.write_text(f'#!/bin/sh\nexec {words} {PYTHON} "$@"\n')
    script.chmod(0o755)
    started = subprocess.run([script, "-c", "pass"], capture_output=True, check=False)
    if started.returncode:
        pytest.skip(f"`{words}` does not work here: {started.stderr.decode().strip()}")
    return str(script)


@pytest.fixture(params=["this user", "an unprivileged user"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param == "this user":
        return None
    if os.geteuid():
        pytest.skip("this user is one")
    return wrapped(tmp_path, "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Marked:
    """The processes that workers of this test are, or have started."""
    mark = f"LANG={tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv(*mark.split("="))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    def find() -> set[int]:
        found = set()
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_zombie = (directory / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not is_zombie and mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.add(int(directory.name))
        return found - {os.getpid()}

    if os.geteuid():
        pytest.skip("only root sees the environment of processes that nobody may look into")
    return find


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - processes that are not our children begin and end without a word
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_harms_nobody_and_leaves_nothing(attack: str, python: str | None, marked: Marked) -> None:
    code, kind, text = ATTACKS[attack]
    timeout_s = 3.0 if "longer" in text else 60.0
    async with opened(python=python, timeout_s=timeout_s, memory_limit_bytes=1 << 29) as environment:
        first: list[Step] = []
        second: list[Step] = []
        assert (await play(environment, first, count())).texts == ("1",)
        assert (await play(environment, second, count(), problem=OTHER)).texts == ("1",)
        answered = await play(environment, first, run(code))
        assert re.fullmatch(kind, answered.kind), answered
        assert re.search(text, answered.texts[0]), answered
        assert (await play(environment, second, count(), problem=OTHER)).texts == ("2",)
        if attack != "changed builtins":  # its own episode has what it asked for
            assert (await play(environment, first, count())).texts == ("2",)
        assert (await play(environment, [], count(2))).texts == ("2",)  # a new one
    await until(lambda: not marked())
    assert not (SUPPORT / "written").exists()
    assert not Path("written").exists()  # noqa: ASYNC240 - a name in the working directory


@pytest.mark.parametrize("network", [False, True])
async def test_the_network_is_there_only_if_it_is_asked_for(network: bool, marked: Marked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection({server.getsockname()}, timeout=1)\nout = 'there'"
        async with opened(network=network) as environment:
            answered = await play(environment, [], run(code))
    assert answered.texts[0] == "there" if network else answered.kind == "error"


async def test_a_program_takes_no_part_of_the_episode_that_started_it(marked: Marked) -> None:
    """Neither its memory nor its files: a tool may run a model's code in a program, and reward what that prints."""
    code = """
import subprocess, sys
reach = "import os, sys\\ntry: print(os.open(sys.argv[1], 0))\\nexcept OSError as error: print(error.strerror)"
files = ["/proc/1/mem", *(f"/proc/1/fd/{number}" for number in range(3, 9))]
done = [subprocess.run([sys.executable, "-c", reach, file], capture_output=True, text=True).stdout for file in files]
out = sorted({*done})
"""
    async with opened() as environment:
        answered = await play(environment, [], run(code))
    assert answered.texts == ('["No such file or directory\\n", "Permission denied\\n"]',)


async def test_keys_of_the_run_reach_no_worker(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    code = "import os\nout = str(dict(os.environ))"
    async with opened() as environment:
        (text,) = (await play(environment, [], run(code))).texts
    assert "PATH" in text
    assert "secret" not in text


LOOP = "import subprocess\nsubprocess.Popen(['sleep', '600'])\nwhile True: pass"
BUSY = 4  # processes: the worker, the two of an episode, and its program


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended with another
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["worker killed", "episode killed", "cancelled", "deadline", "left"])
async def test_a_turn_that_is_cut_short_leaves_nothing_and_the_next_is_right(end: str, marked: Marked) -> None:
    async with opened() as environment:
        steps: list[Step] = []
        worker = marked()
        assert (await play(environment, steps, count(5))).texts == ("5",)
        turn = asyncio.create_task(play(environment, steps, run(LOOP), seconds=3.0 if end == "deadline" else 600.0))
        await until(lambda: len(marked()) == BUSY)
        if end == "episode killed":
            kill(marked() - worker)
            assert (await turn).kind == "killed"
        elif end == "worker killed":
            kill(worker)
            with pytest.raises(TransientError, match=r"environment worker \(pid \d+\) was killed by SIGKILL"):
                await turn
        elif end == "deadline":
            with pytest.raises(DeadlineExceededError):
                await turn
        elif end == "cancelled":
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
        if end != "left":
            assert (await play(environment, steps, count())).texts == ("6",)
            assert environment.replayed_steps == 1
            await until(lambda: len(marked()) == BUSY - 1)
    if end == "left":
        with pytest.raises(TransientError):
            await turn
    await until(lambda: not marked())


@pytest.mark.parametrize("who", ["worker", "episode"])
async def test_what_is_killed_between_turns_is_played_again(who: str, marked: Marked) -> None:
    async with opened() as environment:
        steps: list[Step] = []
        worker = marked()
        await play(environment, steps, count(5))
        killed = worker if who == "worker" else marked() - worker
        kill(killed)
        assert await gone(killed)  # its end of the channel is closed then, which is not so when its name goes
        await until(lambda: who == "episode" or not any(each.alive for each in environment._pools[0]._workers))
        assert (await play(environment, steps, count())).texts == ("6",)
        assert environment.replayed_steps == 1
    await until(lambda: not marked())


PARENT = f"""
import asyncio, sys
sys.path.append({str(SUPPORT)!r})
from played_worlds import opened, play, run
async def main():
    async with opened(timeout_s=600.0) as environment:
        await play(environment, [], run({LOOP!r}))
asyncio.run(main())
"""


async def test_workers_and_episodes_end_with_a_run_that_is_killed(marked: Marked) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, cwd=SUPPORT.parents[1])
    try:
        await until(lambda: len(marked() - {parent.pid}) == BUSY)
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not marked())


async def test_a_machine_without_namespaces_is_said_with_the_key(tmp_path: Path, marked: Marked) -> None:
    refuse = "'echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"'"
    python = wrapped(tmp_path, "unshare", "--user", "--map-root-user", "sh", "-c", refuse, "sh")
    with pytest.raises(ConfigError, match=r"no user namespaces \(.*unshare.*set environment.sandbox=none for") as said:
        async with opened(python=python):
            pass
    assert "\n" not in str(said.value)
    async with opened(python=python, sandbox="none", timeout_s=3.0) as environment:
        steps: list[Step] = []
        assert (await play(environment, steps, count())).texts == ("1",)
        assert (await play(environment, steps, run("while True: pass"))).kind == "killed"
        assert (await play(environment, steps, count())).texts == ("2",)
    await until(lambda: not marked())
