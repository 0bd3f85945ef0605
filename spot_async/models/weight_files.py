"""Which files of a Hugging Face directory hold its weights; making such a directory, keeping it in use, deleting it.

Reads no tensor and imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import structlog

from spot_async.errors import DataError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The directory's safetensors files; raises `DataError` when there are none or the index is unusable."""
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if not index.is_file():
        raise DataError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: is no index of safetensors files: {error}") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise DataError(f"{index}: names files outside its directory")
    return [directory / name for name in names]


@contextlib.contextmanager
def complete_directory(final: Path) -> Iterator[Path]:
    """A directory to fill with files, which gets its name once it is complete.

    It is a hidden sibling until then, whose files are on the disk before it is renamed: a reader sees all of `final` or
    nothing of it, also after a power cut. Where filling it fails nothing is left.
    """
    partial = final.with_name(f".{final.name}")
    if partial.exists():  # of a process that was killed
        shutil.rmtree(partial)
    try:
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            _fsync(file)
        _fsync(partial)
        partial.rename(final)
        _fsync(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """While inside, `delete_weights` leaves the directory alone, in whichever process. Ends with this process too.

    Where the directory or the file system's locks are not there nothing is kept, and nothing fails.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(_opened(stack, directory), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def delete_weights(directory: Path) -> None:
    """Delete a directory that nobody needs. It stays while it is `in_use`.

    One that cannot be deleted, as on a busy disk, is logged and stays.
    """
    try:
        with contextlib.ExitStack() as stack:
            descriptor = _opened(stack, directory)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:  # a file system without locks
                pass
            shutil.rmtree(directory)
    except OSError as error:
        structlog.get_logger().warning("old weights cannot be deleted", directory=str(directory), error=str(error))


def _opened(stack: contextlib.ExitStack, directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _fsync(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        os.fsync(_opened(stack, path))
