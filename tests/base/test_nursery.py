"""Children forked from one warm process: they are as programs that were started, and end with who ordered them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_folder import of_common_names
from process_trees import gone, is_alive

from spot_async.base.processes import child as child_module
from spot_async.base.processes import nursery as nursery_module
from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.nursery import Nursery
from spot_async.errors import ProcessDiedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and ties processes to their parents")

# What it is told to be, it writes to its log as one line of JSON, and then ends as it is told.
PROGRAM = """
import json, os, signal, sys, time
from spot_async.base.processes.exits import exit_with_parent

if __name__ == "__main__":
    exit_with_parent()
    print(json.dumps({
        "words": sys.argv[1:],
        "environment": {name: value for name, value in os.environ.items() if name != "SPOT_ASYNC_PARENT"},
        "cores": sorted(os.sched_getaffinity(0)),
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "input": sys.stdin.read(),
        "directory": os.getcwd(),
        "handlers": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "warm": "warmed" in sys.modules,
        "files": [each for each in range(3, 64) if os.path.exists(f"/proc/self/fd/{each}")],
    }), flush=True)
    match sys.argv[1]:
        case "code": sys.exit(int(sys.argv[2]))
        case "words": sys.exit("error: these words")
        case "raise": raise ValueError("a reason")
        case "signal": os.kill(os.getpid(), int(sys.argv[2]))
        case "stay": time.sleep(600)
        case "work":
            while time.process_time() < 1.0: pass
"""


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nursery]]:
    """A nursery of this process, whose one program is `program` below `tmp_path`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "warmed.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(nursery_module, "gpu_count", lambda: 0)
    begun = []

    def start(*imports: str) -> Nursery:
        begun.append(Nursery())
        monkeypatch.setattr(child_module, "NURSERY", begun[-1])
        begun[-1].begin(["program"], imports or ["warmed"])
        return begun[-1]

    yield start
    for each in begun:
        each.end()


async def start(folder: Path, *words: str, **keys: Any) -> ChildProcess:
    log = folder / f"{words[0]}-{time.monotonic_ns()}.log"
    return await ChildProcess.start("server", [sys.executable, "-m", "program", *words], log_path=log, **keys)


def told(child: ChildProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(child.log_path.read_text().splitlines()[0])
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what other processes do is no asyncio event
            await asyncio.sleep(0.01)


async def until_told(child: ChildProcess) -> dict[str, Any]:
    await until(lambda: child.log_path.read_text().endswith("\n"))
    return told(child)


def of_process(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def end_of(child: ChildProcess) -> str:
    with pytest.raises(ProcessDiedError) as died:
        await child.watch()
    return str(died.value).replace(str(child.pid), "PID").replace(str(child.log_path), "LOG")


async def test_a_forked_child_is_as_one_that_was_started(begin, tmp_path, monkeypatch):
    """Words, environment, cores, session, input, directory, signals, open files, log, and the end that is told."""
    monkeypatch.setenv("A_VARIABLE", "of ours")
    keys = {
        "environment": {"SPOT_ASYNC_KEY": "its own", "OMP_NUM_THREADS": "2", "PYTHONSAFEPATH": "1"},  # as a server's
        "cores": [max(os.sched_getaffinity(0))],
    }
    ways = [("code", "0"), ("code", "3"), ("words",), ("raise",), ("signal", "9"), ("signal", "15")]
    started = []
    for is_warm in (False, True):
        begin() if is_warm else monkeypatch.setattr(child_module, "NURSERY", Nursery())
        found = []
        for words in ways:
            child = await start(tmp_path, *words, **keys)
            found.append((await end_of(child), told(child)))
        assert [each.pop("warm") for _, each in found] == [is_warm] * len(ways)
        assert [len(each.pop("files")) for _, each in found] == [int(is_warm)] * len(ways)  # by it the end is noticed
        started.append(found)
    assert started[0] == started[1]
    (_, first), *_ = started[1]
    assert first["environment"]["A_VARIABLE"] == "of ours"
    assert (first["cores"], first["input"], first["leads"]) == (keys["cores"], "", True)
    ends = [end for end, _ in started[1]]
    assert "exited with code 1: ValueError: a reason" in ends[3]
    assert "was killed by SIGKILL" in ends[4]


async def test_a_forked_child_shares_our_cores_and_shows_its_command_line(begin, tmp_path):
    """The nursery begins before the run is confined to the cores that its servers leave it."""
    begin()
    whole = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(whole)})
        child = await start(tmp_path, "stay")
    finally:
        os.sched_setaffinity(0, whole)
    try:
        found = await until_told(child)
        assert found["cores"] == [min(whole)]
        assert found["warm"]
        line = of_process(child.pid, "cmdline").rstrip("\0").split("\0")
        assert line == [sys.executable, "-m", "program", "stay"]
    finally:
        await child.stop()
    assert not is_alive(child.pid)


@pytest.mark.parametrize("is_warm", [False, True])
async def test_a_child_imports_nothing_of_the_working_directory(begin, tmp_path, monkeypatch, is_warm):
    """Nor does what it starts by itself, as torch starts compilers."""
    monkeypatch.chdir(of_common_names(tmp_path / "theirs"))
    begin("random") if is_warm else monkeypatch.setattr(child_module, "NURSERY", Nursery())
    (tmp_path / "program.py").write_text(
        "import subprocess, sys, json, queue, random, types\n"
        "subprocess.run([sys.executable, '-m', 'json.tool', '--help'], check=True)\n"
        "sys.exit('error: came to its end')"
    )
    assert (await end_of(await start(tmp_path, "go"))).startswith(
        "server (pid PID) exited with code 1: error: came to its end"
    )


async def test_no_childs_environment_holds_anothers_key(begin, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SERVICE", "key-of-a-service-that-no-name-betrays")
    monkeypatch.setenv("HF_TOKEN", "key-of-a-hub")
    nursery = begin()
    first = await start(tmp_path, "stay", environment={"SPOT_ASYNC_API_KEY": "key-of-the-first"})
    second = await start(tmp_path, "stay", environment={"SPOT_ASYNC_API_KEY": "key-of-the-second"})
    try:
        own = [(await until_told(each))["environment"] for each in (first, second)]
        assert [each["SPOT_ASYNC_API_KEY"] for each in own] == ["key-of-the-first", "key-of-the-second"]
        assert not any("HF_TOKEN" in each for each in own)
        for pid in (nursery._process.pid, first.pid, second.pid):
            assert "key-of-" not in of_process(pid, "environ")
    finally:
        await first.stop()
        await second.stop()


async def test_a_killed_nursery_takes_its_children_along_and_the_next_are_started_without_it(begin, tmp_path):
    nursery = begin()
    children = [await start(tmp_path, "stay") for _ in range(2)]
    for each in children:
        assert (await until_told(each))["warm"]
    nursery._process.kill()
    for each in children:
        assert "was killed by SIGKILL" in await end_of(each)
    assert await gone([each.pid for each in children])
    for _ in range(2):
        late = await start(tmp_path, "stay")
        assert not (await until_told(late))["warm"]
        await late.stop()


async def test_a_nursery_that_ends_before_it_has_forked_is_done_without(begin, tmp_path):
    """It is asked while it imports. What it cannot import, its programs cannot either, and their logs say so."""
    (tmp_path / "absent_import.py").write_text("import no_such_module")
    begin("absent_import")
    child = await start(tmp_path, "code", "0")
    assert "exited with code 0" in await end_of(child)
    assert not told(child)["warm"]


async def test_a_nursery_that_stands_still_holds_up_no_start(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(nursery_module, "PATIENCE_S", 0.2)
    nursery = begin()
    os.kill(nursery._process.pid, signal.SIGSTOP)
    child = await start(tmp_path, "stay")
    assert not (await until_told(child))["warm"]
    os.kill(nursery._process.pid, signal.SIGCONT)
    await child.stop()


async def test_a_start_that_is_given_up_leaves_no_child(begin, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(1)")
    nursery = begin("slow")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await start(tmp_path, "stay")
    child = await start(tmp_path, "stay")  # its nursery has gone through the order before
    await until_told(child)
    below = f"task/{nursery._process.pid}/children"
    await until(lambda: of_process(nursery._process.pid, below).split() == [str(child.pid)])
    await child.stop()


async def test_what_a_library_may_have_read_before_the_fork_is_started_anew(begin, tmp_path):
    begin()
    child = await start(tmp_path, "stay", environment={"MKL_CBWR": "COMPATIBLE"})
    assert not (await until_told(child))["warm"]
    await child.stop()


async def test_a_nursery_with_a_second_thread_forks_nothing(begin, tmp_path):
    (tmp_path / "busy.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()"
    )
    begin("busy")
    child = await start(tmp_path, "code", "0")
    assert "exited with code 0" in await end_of(child)
    assert not told(child)["warm"]


async def test_nothing_is_forked_where_a_gpu_is_visible(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(nursery_module, "torch_has_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, hidden, is_warm in ((1, None, False), (None, None, False), (1, "", True), (0, None, True)):
        monkeypatch.setattr(nursery_module, "gpu_count", lambda count=count: count)
        if hidden is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        begin()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        child = await start(tmp_path, "code", "0")
        await end_of(child)
        assert told(child)["warm"] is is_warm


OWNER = """
import asyncio, sys
from pathlib import Path
from spot_async.base.processes.nursery import NURSERY
NURSERY.begin(["program"], ["warmed"])
from spot_async.base.processes.child import ChildProcess

async def main():
    folder = Path(sys.argv[1])
    for name in ("a", "b"):
        command = [sys.executable, "-m", "program", *(sys.argv[2:] or ["stay"])]
        child = await ChildProcess.start(name, command, log_path=folder / f"{name}.log")
        print(child.pid, flush=True)
    print(NURSERY._process.pid, flush=True)
    await child.watch()

asyncio.run(main())
"""


def ended(folder: Path, said: int, number: int) -> list[int]:
    """Start who begins a nursery, and end it by a signal once it has said so many pids, which are returned."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()) for _ in range(said)]
        assert all(map(is_alive, pids))
        owner.send_signal(number)
    return pids


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGTERM])
async def test_all_ends_with_who_began_the_nursery(begin, tmp_path, killed):
    assert await gone(ended(tmp_path, 3, killed))


REPORTS_SLOWLY = """
import os, time
written = os.write

def write(*given):
    done = written(*given)
    time.sleep(0.5)
    return done

os.write = write
"""


async def test_a_child_ends_that_had_just_begun_when_all_was_killed(begin, tmp_path):
    """It has said that it began, and does not yet know whose child it is."""
    (tmp_path / "warmed.py").write_text(REPORTS_SLOWLY)
    assert await gone(ended(tmp_path, 2, signal.SIGKILL))


def test_the_cpu_time_of_forked_children_is_that_of_who_began_the_nursery(begin, tmp_path):
    """As `time spot-async train` and a scheduler's bill count it."""
    used = (
        "import atexit, resource\natexit.register(lambda: print(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])))"
    )
    command = [sys.executable, "-c", used + OWNER, str(tmp_path), "work"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert float(done.stdout.splitlines()[-1]) > 0.9  # without the nursery's it would be 0
