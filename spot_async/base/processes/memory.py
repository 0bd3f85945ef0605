"""Memory of this machine: how much is free, and settings of long-running processes for it.

Those are of Python's garbage collector, and of glibc's malloc where torch computes.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def is_in_memory(directory: Path) -> bool:
    """Whether the file system of a directory keeps its files in memory, as that of /dev/shm does."""
    path, kinds = directory.resolve(), {}
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split()
            kinds[Path(place.replace("\\040", " "))] = kind  # the last one at a place hides those before
    mount = next((each for each in (path, *path.parents) if each in kinds), None)
    return mount is not None and kinds[mount] in ("tmpfs", "ramfs")


def available_bytes() -> int:
    """Return how much memory processes of ours can still take: of the machine, and of the groups that limit us."""
    found = [sys.maxsize]
    with suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    with suppress(OSError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = Path("/sys/fs/cgroup") / next(each for each in groups if each.startswith("0::"))[len("0::/") :]
        for group in (own, *own.parents):
            found += _left_in(group)
    return min(found)


def _left_in(group: Path) -> Iterator[int]:
    """Yield what a control group (version 2) has left, if it has a limit. Cached files make room when they must."""
    with suppress(OSError, ValueError):  # no limit is called `max`
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


@contextmanager
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
    """Make garbage collections rare and cheap. Call this once everything long-lived is loaded.

    The half million objects that exist now, mostly the libraries', are never examined again. Requests and tasks make
    thousands of new objects but few cycles. So a collection comes after `threshold` new objects, beyond those of
    `prompts` in flight.
    """
    gc.freeze()
    gc.set_threshold(threshold + PROMPT_OBJECTS * prompts)
