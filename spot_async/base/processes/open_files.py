"""Raises the limit of files and connections that a process may have open."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 1 << 16


def raise_open_file_limit() -> None:
    """Raise the limit to `ENOUGH`, or as far as the system allows; the default is 1,024.

    Other users can connect to a port on loopback. Each connection is an open file, and torch aborts a process that
    cannot open another.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a second limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
