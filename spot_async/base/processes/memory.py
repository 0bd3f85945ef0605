"""Memory settings of long-running processes: Python's garbage collector, and glibc's malloc where torch computes."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTION_THRESHOLD = 20_000  # new objects that a collection of the youngest waits for; Python's own is 700

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def tune_malloc() -> None:
    """Keep freed memory in the heap instead of handing it back after every tensor.

    By default each large tensor is a fresh mapping whose pages fault in one by one, and those faults
    can cost more than the arithmetic. Call it before the first tensor; elsewhere than on glibc a no-op.
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
    """For imports of torch and transformers: nothing that they make is garbage, and to look for some again and again
    while it grows takes a fifth of their seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_gc() -> None:
    """Keep the collector out of the way. Call it once everything long-lived is loaded.

    What is there now is never walked again: the libraries' half million objects. Requests and tasks make new objects
    by the thousand and few cycles among them, so collections can be rare.
    """
    gc.freeze()
    gc.set_threshold(COLLECTION_THRESHOLD)
