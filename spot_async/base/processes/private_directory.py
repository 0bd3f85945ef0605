"""Temporary directories, for sockets and weights, that only this user can enter and that do not outlive their process.

A process removes its own directories, even where it exits without other clean-up. A killed process cannot. The next
process of the same user that makes a directory in the same place removes those. It recognises them by their lock, which
the kernel releases when the owner dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spot_async.errors import StorageError

SOCKET_PATH_BYTES = 100  # operating systems allow 104 to 108
NAME_BYTES = 40  # of a directory here and a socket in it
SHORT = "/tmp"

_SWEPT = "spot-"  # the names' prefix
_LOCK = "owner"  # a directory without this file is left alone: it may be somebody else's, or be on a disk without locks

_open: set[Path] = set()


@contextlib.contextmanager
def private_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory (mode 0700) in `parent`, and remove it on leaving.

    Without a `parent`, its path is short enough for a Unix socket in it: it is in $TMPDIR, or in /tmp where that path
    is too long, as those of batch systems are. Raises StorageError where none can be made.
    """
    remedy = "" if parent is not None else ": set TMPDIR to a short path that can be written"
    parent = parent or Path(short_temporary_directory())
    with contextlib.ExitStack() as stack:
        try:
            remove_abandoned(parent)
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            _open.add(path)
            stack.callback(_remove, path)
            _lock(path, stack)
        except OSError as error:
            raise StorageError(f"no private directory can be made in {parent}: {error.strerror}{remedy}") from None
        yield path


def short_temporary_directory() -> str:
    """Return $TMPDIR, or /tmp where its path is too long for a socket in a directory of its own."""
    given = tempfile.gettempdir()
    return given if len(os.fsencode(given)) + NAME_BYTES <= SOCKET_PATH_BYTES else SHORT


def remove_private_directories() -> None:
    """Remove this process's directories. For a process that is about to exit without any other clean-up."""
    for path in list(_open):
        _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    _open.discard(path)


def _lock(directory: Path, stack: contextlib.ExitStack) -> None:
    """Lock the directory. The lock file gets its name only once it is locked, so that nobody can take it before."""
    file = stack.enter_context((directory / "new").open("x"))
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / "new").rename(directory / _LOCK)


def remove_abandoned(parent: Path) -> None:
    """Remove the user's directories in `parent` whose owners are gone."""
    found: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:  # some directories cannot be listed
        found = [Path(entry) for entry in entries if entry.name.startswith(_SWEPT) and _is_ours(entry)]
    for directory in found:
        with contextlib.suppress(OSError), (directory / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):  # it has gone
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False
