"""Downloads models of the hub before a command begins. Ctrl-C then ends the command at once."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from spot_async.cli.ending import leave_at_once, stderr
from spot_async.config import Config
from spot_async.models.hub import ROLES, with_downloads


def downloaded(config: Config, *, weights: Collection[str] = ROLES) -> Config:
    """Return the configuration with the models of the hub in the cache; see `with_downloads`. Raises as that does."""
    with ending_at_once():
        return with_downloads(config, remark, weights=weights)


def remark(line: str) -> None:
    """Print a line beside what the command shows, which programs may read."""
    stderr.print(line, markup=False)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end this process inside. Nothing is started yet, and the threads of a download hear of nothing."""

    def leave(number: int, frame: Any) -> None:
        leave_at_once("stopped by SIGINT before anything was started; the same command goes on", 128 + number)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
