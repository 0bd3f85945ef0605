"""Cores of their own for servers: who gets which, and that processes really stay there."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.cores import available_cores, confined, share_cores
from spot_async.errors import ProcessDiedError
from spot_async.processes import ChildProcess

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


@needs_two_cores
async def test_what_starts_while_a_process_is_confined_shares_its_cores_unless_told_otherwise(tmp_path):
    shares = share_cores(available_cores(), {"student": 1})
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)  # was there before
    thread.start()
    try:
        with confined(shares):
            assert cores_of_threads() == {shares.shared}
            await child_runs_on(shares.shared, tmp_path / "plain", None)
            await child_runs_on(shares.own["student"], tmp_path / "own", shares.own["student"])
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == shares.available
    finally:
        waiting.set()
        thread.join()


def cores_of_threads() -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(entry.name))) for entry in Path("/proc/self/task").iterdir()}


async def child_runs_on(expected: frozenset[int], log_path: Path, cores: frozenset[int] | None) -> None:
    """It is bound once it was started, so it looks for a while where it is."""
    say = (
        "import os, time\n"
        "here, end = lambda: sorted(os.sched_getaffinity(0)), time.monotonic() + 10\n"
        f"while here() != {sorted(expected)} and time.monotonic() < end: time.sleep(0.01)\n"
        "print(here())"
    )
    child = await ChildProcess.start("child", [sys.executable, "-c", say], log_path=log_path, cores=cores)
    with pytest.raises(ProcessDiedError, match="exited with code 0"):
        await child.watch()
    assert child.log_tail() == f"{sorted(expected)}\n"
