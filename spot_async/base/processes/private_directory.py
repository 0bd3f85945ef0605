"""Temporary directories, mostly for sockets: only this user can enter them, and none stays for long after its process.

A process removes its own, also at an end that skips all clean-up. One that is killed cannot: its directories are swept
by the next process of the same user that makes one. The owner holds a lock in each, which the kernel ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spot_async.errors import ConfigError, StorageError

SOCKET_PATH_BYTES = 100  # the operating systems' limits are 104 to 108

_SWEPT = "spot-"  # what the names begin with
_LOCK = "owner"  # without it a directory is not swept: it may be anybody's, or have been made where no locks are

_open: set[Path] = set()


@contextlib.contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """A new directory (mode 0700), removed on leaving; its path is short, as a Unix socket's must be.

    Raises StorageError where none can be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            _sweep(Path(tempfile.gettempdir()))
            path = Path(tempfile.mkdtemp(prefix=prefix))
            _open.add(path)
            stack.callback(_remove, path)
            _lock(path, stack)
        except OSError as error:
            raise StorageError(
                f"no private directory can be made in {tempfile.gettempdir()}: {error.strerror}: set TMPDIR to one "
                "that can be written"
            ) from None
        yield path


def remove_private_directories() -> None:
    """Remove those that are still open: for a process that is about to end without leaving anything in order."""
    for path in list(_open):
        _remove(path)


def check_length(directory: Path) -> None:
    """Raises `ConfigError` for a directory whose path is too long for a socket in it."""
    if len(os.fsencode(directory)) + len("/ready") > SOCKET_PATH_BYTES:
        raise ConfigError(f"{directory} is too long for a socket's path: set TMPDIR to a shorter directory")


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    _open.discard(path)


def _lock(directory: Path, stack: contextlib.ExitStack) -> None:
    """Hold the directory's lock. It has its name only once it is held, so that nobody takes it before."""
    file = stack.enter_context((directory / "new").open("x"))
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / "new").rename(directory / _LOCK)


def _sweep(parent: Path) -> None:
    """Remove the user's directories whose owners are gone."""
    found: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:  # it may be one that cannot be listed
        found = [Path(entry) for entry in entries if entry.name.startswith(_SWEPT) and _is_ours(entry)]
    for directory in found:
        with contextlib.suppress(OSError), (directory / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):  # it went away meanwhile
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False
