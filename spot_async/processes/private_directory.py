"""Temporary directories for sockets: only this user can enter them, and none outlives an end that skips all clean-up.

Of a process that is killed they stay: nobody is left to remove them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spot_async.errors import ConfigError, StorageError

SOCKET_PATH_BYTES = 100  # the operating systems' limits are 104 to 108

_open: set[Path] = set()


@contextlib.contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """A new directory (mode 0700), removed on leaving; its path is short, as a Unix socket's must be.

    Raises StorageError where none can be made.
    """
    try:
        path = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise StorageError(
            f"no directory for sockets can be made in {tempfile.gettempdir()}: {error.strerror}: set TMPDIR to one "
            "that can be written"
        ) from None
    _open.add(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _open.discard(path)


def remove_private_directories() -> None:
    """Remove those that are still open: for a process that is about to end without leaving anything in order."""
    for path in list(_open):
        shutil.rmtree(path, ignore_errors=True)


def check_length(directory: Path) -> None:
    """Raises `ConfigError` for a directory whose path is too long for a socket in it."""
    if len(os.fsencode(directory)) + len("/ready") > SOCKET_PATH_BYTES:
        raise ConfigError(f"{directory} is too long for a socket's path: set TMPDIR to a shorter directory")
