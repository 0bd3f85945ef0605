"""glibc malloc settings for processes that compute with torch on a CPU."""

from __future__ import annotations

import ctypes
import sys

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
