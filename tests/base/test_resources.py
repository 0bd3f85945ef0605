"""What our processes take: cores of their own for servers, memory and its collector, the limit of open files."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.base.processes.child import ChildProcess, log_lines
from spot_async.base.processes.resources import (
    available_bytes,
    available_cores,
    confined,
    is_in_memory,
    share_cores,
    usable_cores,
    without_gc,
)
from spot_async.errors import ProcessDiedError

Start = Callable[..., Awaitable[ChildProcess]]
needs_two_cores = pytest.mark.skipif(
    len(available_cores()) < 2, reason="needs two cores that processes can be bound to"
)


@given(
    st.sets(st.integers(0, 63), max_size=12),
    st.dictionaries(st.sampled_from(["student-1", "student-2", "teacher"]), st.integers(0, 6)),
)
def test_servers_get_what_they_want_and_something_is_shared_or_nobody_gets_any(available, wanted):
    shares = share_cores(available, wanted)
    total = sum(wanted.values())
    if total and total >= len(available):
        assert not shares.own
        assert shares.shared == available
        (warning,) = shares.warnings
        assert all(f"{count} ({server})" in warning for server, count in wanted.items() if count)
        return
    assert {server: len(cores) for server, cores in shares.own.items()} == {s: n for s, n in wanted.items() if n}
    assert len(shares.shared) == len(available) - total  # none has two owners
    assert shares.shared.union(*shares.own.values()) == available
    assert not shares.warnings


def test_where_the_system_refuses_to_bind_processes_all_cores_are_shared(monkeypatch):
    """As in some containers, which tell the cores but let nobody choose."""

    def refuse(pid, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    assert available_cores() == frozenset()
    assert usable_cores() == 24
    (warning,) = share_cores(available_cores(), {"student": 2}).warnings
    assert "binds no processes to cores" in warning


@needs_two_cores
async def test_what_starts_while_a_process_is_confined_shares_its_cores_unless_told_otherwise(tmp_path):
    shares = share_cores(available_cores(), {"student": 1})
    own = shares.own["student"]
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)  # was there before
    thread.start()
    assert thread.native_id is not None
    os.sched_setaffinity(thread.native_id, own)
    try:
        with confined(shares):
            assert cores_of_threads() == {shares.shared}
            for start in (ChildProcess.start, ChildProcess.start_foreign):
                assert await cores_of_child(start, tmp_path, None) == shares.shared
                assert await cores_of_child(start, tmp_path, own) == own
                gone = await cores_of_child(start, tmp_path, {4095})  # no core of this machine, any more
                assert gone == shares.shared
        assert os.sched_getaffinity(thread.native_id) == own  # as its program had bound it
        assert os.sched_getaffinity(0) == shares.available
    finally:
        waiting.set()
        thread.join()


def cores_of_threads() -> set[frozenset[int]]:
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(frozenset(os.sched_getaffinity(int(thread.name))))
    return found


async def cores_of_child(start: Start, directory: Path, cores: Collection[int] | None) -> frozenset[int]:
    """Of a child of ours, or of a program under a guard."""
    say = "import os; print(*os.sched_getaffinity(0))"
    ours = f"from spot_async.base.processes.exits import exit_with_parent; exit_with_parent(); {say}"
    log_path = directory / f"{start.__name__}-{cores}.log"
    code = ours if start == ChildProcess.start else say
    child = await start("child", [sys.executable, "-c", code], log_path=log_path, cores=cores)
    with pytest.raises(ProcessDiedError, match="exited with code 0"):
        await child.watch()
    return frozenset(map(int, log_lines(child.log_path, 1)[0].split()))


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    gc.enable()


@without_gc()
def is_enabled_inside() -> bool:
    return gc.isenabled()


@without_gc()
def fail() -> None:
    raise ImportError


def test_the_collector_rests_during_an_import_and_is_as_it_was_afterwards(as_it_was: None) -> None:
    assert not is_enabled_inside()
    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    gc.disable()
    assert not is_enabled_inside()
    assert not gc.isenabled()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no memory with a name")
def test_files_of_dev_shm_are_in_memory_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert is_in_memory(Path("/dev/shm"))
    assert is_in_memory(tmp_path / "link")
    assert not is_in_memory(Path("/proc"))
    assert 0 < available_bytes() < 1 << 50


CHILD = """
import json, resource
from spot_async.base.processes.resources import OPEN_FILES, raise_open_file_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_open_file_limit()
found = [resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
raise_open_file_limit()
found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(json.dumps([found, [OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard), 300]]))
"""


def test_a_process_may_open_as_many_files_as_it_is_let() -> None:
    """1,070 connections of another user once ended a run whose ranks might have 1,024 files open."""
    said = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout
    found, wanted = json.loads(said)
    assert found == wanted
