"""Where commands that leave no run behind (doctor, conformance) write: logs, weights to try."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from spot_async.base.processes.private_directory import private_directory
from spot_async.errors import ConfigError
from spot_async.telemetry.run_log import log_events_to


@contextlib.contextmanager
def working_directory(given: Path | None) -> Iterator[Path]:
    """`given`, kept, or a temporary directory; with `logs/` in it, to which this process' events go as well.

    Raises ConfigError when it cannot be made, StorageError when a temporary one cannot.
    """
    with contextlib.ExitStack() as stack:
        path = given or stack.enter_context(private_directory("spot-async-"))
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made: {error.strerror}") from None
        stack.enter_context(log_events_to(path / "logs" / "events.jsonl"))
        yield path.resolve()
