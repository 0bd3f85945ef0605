"""What processes of a run take of their machine: cores, memory and open files.

Cores are divided: some servers get their own, the rest are shared. An engine on shared cores waits, and loses its
caches, each time the orchestrator or another server wakes up. The setting `own_cores` says which servers want cores.
Those are bound to their own. The orchestrator and everything it starts are bound to the rest, except the trainer: in
strict mode nothing else has work while it trains.

There are settings of long-running processes: of Python's garbage collector, and where torch computes of glibc's malloc
and of MKL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import platform
import resource
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spot_async.errors import SpotError

# New objects between two collections of the youngest generation; Python's own is 700. Our requests leave nothing in
# cycles, not even failed ones, but a connection that ends leaves some 20 of aiohttp's objects, 4 KB in all. So some 10
# MB may wait for a collection, which takes some milliseconds.
COLLECTION_THRESHOLD = 50_000
# Of a prompt in flight, with SPOT's rollout and eight probes. Examining them is in vain, so as many more objects may
# wait as prompts can be in flight.
PROMPT_OBJECTS = 400
# The same for a server. What its libraries leave in cycles was not measured, so it looks more often.
SERVER_COLLECTION_THRESHOLD = 20_000

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

OPEN_FILES = 1 << 16  # enough for a process of ours


@dataclass(frozen=True)
class CoreShares:
    """Which core numbers each server owns, and which are shared."""

    available: frozenset[int] = frozenset()  # all that the run may use; empty where processes cannot be bound
    own: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by server
    warnings: Sequence[str] = ()

    @property
    def shared(self) -> frozenset[int]:
        """The cores for all processes that have none of their own."""
        return self.available.difference(*self.own.values())


def available_cores() -> frozenset[int]:
    """Return the cores that this process may use; empty where processes cannot be bound (not Linux, or refused)."""
    if sys.platform != "linux":
        return frozenset()
    try:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
    except OSError:
        return frozenset()
    return frozenset(cores)


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1."""
    return len(available_cores()) or os.cpu_count() or 1


def cpu_type() -> str:
    """Return what the system says of this machine's CPU: `AMD EPYC 7763 64-Core Processor, family 25, model 1`.

    The numbers tell CPUs apart whose names are equal, as in virtual machines. Without a name it is the architecture.
    """
    told: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines():  # of the first core
            name, _, value = line.partition(":")
            told[name.strip()] = value.strip()
    numbers = {"family": "cpu family", "model": "model", "implementer": "CPU implementer", "part": "CPU part"}
    known = [f"{word} {told[name]}" for word, name in numbers.items() if name in told]
    return ", ".join([told.get("model name", platform.machine()), *known])


def share_cores(available: Collection[int], wanted: Mapping[str, int]) -> CoreShares:
    """Give each server as many cores as it wants, from the highest number down; at least one stays shared.

    If there are too few cores, no server gets its own. The run then continues, more slowly.
    """
    wanted = {server: count for server, count in wanted.items() if count}
    if wanted and sum(wanted.values()) >= len(available):
        needed = " + ".join(f"{count} ({server})" for server, count in wanted.items())
        found = f"this process may use {len(available)}" if available else "this system binds no processes to cores"
        return CoreShares(
            frozenset(available),
            warnings=[f"own_cores: {needed} and one to share are wanted, but {found}: all are shared"],
        )
    left = sorted(available)
    own = {server: frozenset(left.pop() for _ in range(count)) for server, count in wanted.items()}
    return CoreShares(frozenset(available), own)


@contextlib.contextmanager
def confined(shares: CoreShares) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, to the shared cores."""
    if sys.platform != "linux" or not shares.own:
        yield
        return
    before: dict[int, Collection[int]] = {}
    ours = os.sched_getaffinity(0)
    for thread in _threads():  # new threads and processes inherit the cores of the thread that starts them
        with contextlib.suppress(OSError):  # the thread has ended
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, shares.shared)
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, ours))


def _threads() -> list[int]:
    """Return the ids of this process's threads."""
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]


def is_in_memory(directory: Path) -> bool:
    """Whether the file system of a directory keeps its files in memory, as that of /dev/shm does."""
    path, kinds = directory.resolve(), {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            kinds[Path(place.replace("\\040", " "))] = kind  # the last one at a place hides those before
    mount = next((each for each in (path, *path.parents) if each in kinds), None)
    return mount is not None and kinds[mount] in ("tmpfs", "ramfs")


def free_bytes(path: Path) -> int:
    """Return how much is free on the disk of a path, which may be new."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def available_bytes() -> int:
    """Return how much memory processes of ours can still take: of the machine, and of the groups that limit us."""
    found = [sys.maxsize]
    with contextlib.suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = Path("/sys/fs/cgroup") / next(each for each in groups if each.startswith("0::"))[len("0::/") :]
        for group in (own, *own.parents):
            found += _left_in(group)
    return min(found)


def _left_in(group: Path) -> Iterator[int]:
    """Yield what a control group (version 2) has left, if it has a limit. Cached files make room when they must."""
    with contextlib.suppress(OSError, ValueError):  # no limit is called `max`
        most, taken = (int((group / f"memory.{each}").read_text()) for each in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield most - taken + int(cached["inactive_file"])


def tune_malloc() -> None:
    """Keep freed memory in the heap instead of handing it back after every tensor.

    By default each large tensor is a fresh mapping whose pages fault in one by one, and those faults can cost more than
    the arithmetic. Call this before making the first tensor. It does nothing without glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_TOP_PAD, 1 << 26)


def keep_rows_apart() -> None:
    """Let no row of a matrix product have other bits because of the rows beside it. Call this before the first product.

    On some of Intel's processors MKL otherwise chooses by the number of rows in which order it sums. Its strict mode
    costs nothing measurable there. Other makers' are left alone: there the variable may mean its slowest code.
    """
    with contextlib.suppress(OSError):
        if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
            os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off while torch and transformers are imported.

    Nothing that they make is garbage, and looking for some as the heap grows takes a fifth of the import's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_gc(threshold: int = COLLECTION_THRESHOLD, *, prompts: int = 0) -> None:
    """Make garbage collections rare and cheap. Call this first, and again once everything long-lived is loaded.

    The half million objects that exist now, mostly the libraries', are never examined again. Requests and tasks make
    thousands of new objects but few cycles. So a collection comes after `threshold` new objects, beyond those of
    `prompts` in flight.
    """
    gc.freeze()
    gc.set_threshold(threshold + PROMPT_OBJECTS * prompts)


def raise_open_file_limit() -> None:
    """Raise the limit to `OPEN_FILES`, or as far as the system allows; the default is 1,024.

    Other users can connect to a port on loopback. Each connection is an open file, and torch aborts a process that
    cannot open another.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a second limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_file_limit() -> int:
    """Return how many files and connections this process may have open at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def is_out_of_files(error: object) -> bool:
    """Return whether nothing more could be opened, because too much is open."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)  # ZeroMQ's errors are no OSErrors


def out_of_files() -> SpotError:
    limit = f"this process may have {open_file_limit():,} at a time: raise that with ulimit -n"
    return SpotError(f"too many files and connections are open to open another: {limit}")
