"""Gives a directory for logs and trial weights to commands that leave no run behind (check, tune, forecast)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from spot_async.base.processes.private_directory import private_directory
from spot_async.errors import ConfigError
from spot_async.telemetry.run_log import log_events_to


@contextlib.contextmanager
def working_directory(given: Path | None) -> Iterator[Path]:
    """Make `given`, or a temporary directory that is deleted afterwards. This process's events go to `logs/` in it.

    Raises ConfigError if `given` cannot be made, and StorageError if a temporary directory cannot.
    """
    with contextlib.ExitStack() as stack:
        path = given or stack.enter_context(private_directory("spot-async-"))
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made: {error.strerror}") from None
        stack.enter_context(log_events_to(path / "logs" / "events.jsonl"))
        yield path.resolve()
