"""Reads files that others may have made: regular files only, and no more of them than a bound.

A name in a run or model directory may be a pipe that nobody writes to, a device without an end, or a file of which a
few bytes make gigabytes of objects. So bytes, values and depth are bounded, each refusal is one line, nothing waits.
At the end are the names of directories of which there is one for each step.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from spot_async.base.text import first_line
from spot_async.errors import DataError, StorageError

T = TypeVar("T")

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # what `git clone` leaves where LFS is not installed
MAX_JSON_BYTES = 16 << 20
MAX_VALUES = 1_000_000  # of one JSON file: each takes up to 100 bytes as a Python object, and may take two in the file
MAX_LINE_BYTES = 16 << 20  # a sample with a long response and many probes has about 8 MiB


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an OSError of the `with` block as DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError of the `with` block as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is on the disk when this returns; after a failure it is as it was. Raises StorageError."""
    new = path.with_name(f".{path.name}.new")
    with writing(path):
        new.write_bytes(data)
        flush_to_disk(new)
        new.replace(path)
        flush_to_disk(path.parent)


def as_json(value: object) -> bytes:
    """Return a value as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def flush_to_disk(path: Path) -> None:
    """Return once the file, or the directory's list of files, would outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Versioned(msgspec.Struct):
    """What each format of a file has in common. The rest is skipped, not decoded."""

    format: Any = None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it; links are followed. Raises OSError, also for anything else, without waiting."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_bounded(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, also if it has more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return data


def lines_of(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a regular file, from the byte `start` on.

    Raises OSError, also for a line of more than `MAX_LINE_BYTES`.
    """
    number = 0
    with open_regular(path) as file:
        file.seek(start)
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise OSError(errno.EFBIG, f"line {number} has more than {MAX_LINE_BYTES:,} bytes", str(path))
            yield line


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that lines are appended to: none if it is not there, and not one that a kill tore.

    Raises DataError.
    """
    if path.exists():
        with reading(path):
            yield from (line for line in lines_of(path) if line.endswith(b"\n"))


def decode_json(data: bytes, kind: type[T], where: str, max_values: int = MAX_VALUES) -> T:
    """Return the value of a JSON text. Raises DataError, which begins with `where` the text is from."""
    if max(data.count(b","), data.count(b"["), data.count(b"{")) >= max_values:  # commas in strings count too
        raise DataError(f"{where}: has more than {max_values:,} values")
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise DataError(f"{where}: lists or objects stand too deep within each other") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {first_line(error)}") from None


def decoded_lines(path: Path, kind: type[T], start: int = 0) -> Iterator[tuple[int, int, T]]:
    """Return each line from the byte `start` on with its offset and size; none if there is no file.

    A last line that was cut short is left out.
    """
    if not path.exists():
        return
    offset = start
    with reading(path):
        for number, line in enumerate(lines_of(path, start), start=1):
            where = f"{path}:{number}" if start == 0 else f"{path}, byte {offset}"
            try:
                value = decode_json(line, kind, where, MAX_LINE_BYTES)  # which bounds the values too
            except DataError:
                if line.endswith(b"\n"):
                    raise
            else:
                yield offset, len(line), value
            offset += len(line)


def read_json(path: Path, kind: type[T], *, newest_format: int | None = None, otherwise: str = "cannot be read") -> T:
    """Return the value of a JSON file. Raises DataError, also if its `format` is above `newest_format`.

    `otherwise` is what the message says of a file with another content.
    """
    where = f"{path}: {otherwise}"
    with reading(path):
        data = read_bounded(path)
    if newest_format is not None:
        check_format(path, decode_json(data, _Versioned, where).format, newest_format)
    return decode_json(data, kind, where)


def check_format(path: Path, found: object, most: int, *, continues: bool = False) -> None:
    """Raise DataError if the format that was found is above the newest that this program can read.

    What a run `continues` with must have that format.
    """
    if isinstance(found, int) and found > most:
        raise DataError(f"{path} has format {found}, newer than this spot-async can read ({most}): install a newer one")
    if continues and found != most:
        raise DataError(
            f"{path} has format {found}, and this spot-async continues runs of format {most} only: finish the run with "
            "the version that began it, or begin a new one"
        )


def refuse_pointer(path: Path) -> None:
    """Raise `DataError` if a file is Git LFS's pointer in place of what it should hold."""
    try:
        with open_regular(path) as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return  # whoever reads it says why it cannot
    if is_pointer:
        raise DataError(
            f"{path}: is a Git LFS pointer, and not the file itself: run `git lfs pull` in {path.parent} "
            "(with git-lfs installed)"
        )


def numbered(parent: Path, kind: str, number: int) -> Path:
    """Return the path of a directory: `parent/kind-000012`. Other names beside it are people's own."""
    return parent / f"{kind}-{number:06d}"


def number_of(path: Path, kind: str) -> int | None:
    """Return the number in a name that `numbered` gives; None for any other name, such as that of a copy."""
    found = re.fullmatch(rf"{re.escape(kind)}-([0-9]{{6,}})", path.name)
    return int(found[1]) if found is not None and numbered(path.parent, kind, int(found[1])) == path else None


def all_numbered(parent: Path, kind: str, *, above: int = -1) -> list[Path]:
    """Return the directories of a kind with numbers above `above` that are there, the lowest number first."""
    found = {number_of(path, kind): path for path in parent.glob(f"{kind}-*") if path.is_dir()}
    return [path for number, path in sorted((n, p) for n, p in found.items() if n is not None and n > above)]
