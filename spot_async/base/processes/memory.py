"""Memory settings of long-running processes: Python's garbage collector, and glibc's malloc where torch computes."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
