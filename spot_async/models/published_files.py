"""Notices that weight files were written or replaced after they were published.

A server reads them later than the trainer wrote them, and a server that is started again much later. Between these,
another process of the same user could change them; other users cannot (`base/writers.py`). It reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog

from spot_async.errors import DataError
from spot_async.models.adapter_files import ADAPTER, CONFIG_FILE
from spot_async.models.weight_files import INDEX_FILE
from spot_async.types import WeightFile, WeightSnapshot


def weight_file_marks(directory: Path) -> tuple[WeightFile, ...]:
    """Return what is published in a directory that is complete. A directory that is not there has nothing."""
    return tuple(_mark(directory, path) for path in sorted(_files(directory)))


def marked(snapshot: WeightSnapshot) -> WeightSnapshot:
    """Return a snapshot with its files as they are now, unless it says already how they were published."""
    if snapshot.files:
        return snapshot
    return msgspec.structs.replace(snapshot, files=weight_file_marks(Path(snapshot.directory)))


def check_unchanged(snapshot: WeightSnapshot) -> None:
    """Raise DataError if a file of a snapshot is not the one that was published.

    New links to it are nothing, since the run and backups make them. Another owner or mode is only logged, and so is a
    file whose time was set back after it was written.
    """
    directory = Path(snapshot.directory)
    for published in snapshot.files:
        path = directory / published.name
        try:
            found = _mark(directory, path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read, though it was published: {error.strerror}") from None
        if found == published:
            continue
        if msgspec.structs.replace(found, changed_ns=published.changed_ns) == published:
            if path.stat().st_nlink == 1:
                structlog.get_logger().warning("a published file's owner, mode or times were changed", file=str(path))
            continue
        how = "replaced" if found.inode != published.inode else "written to"
        raise DataError(
            f"{path}: was {how} by another process after it was published as weights {snapshot.version}: what the "
            f"servers loaded is unknown; find that process, remove {directory} and resume the run"
        )


def _files(directory: Path) -> Iterator[Path]:
    for place in (directory, directory / ADAPTER):
        yield from place.glob("*.safetensors")
        yield from filter(Path.is_file, (place / INDEX_FILE, place / CONFIG_FILE))


def _mark(directory: Path, path: Path) -> WeightFile:
    found = path.stat()
    name = path.relative_to(directory).as_posix()
    return WeightFile(name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
