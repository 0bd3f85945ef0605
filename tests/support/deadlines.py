"""Deadlines for requests of tests."""

from __future__ import annotations

import asyncio


def soon(seconds: float = 60.0) -> float:
    """Return a deadline that only what hangs passes, unless a test says otherwise."""
    return asyncio.get_running_loop().time() + seconds
