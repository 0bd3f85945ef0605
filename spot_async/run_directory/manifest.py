"""Reads and writes checkpoints of a run: `checkpoints/step-000012`, which counts once its manifest has its name.

A checkpoint's tensors are written by the trainer's ranks. The manifest comes last: it names each file with its size and
checksum. It is written beside its name, flushed and renamed, so that there is a whole one or none. Everything that a
resumed run needs to know of the run so far follows from the newest manifest whose files are whole.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import structlog

from spot_async.base.files import all_numbered, as_json, flush_to_disk, numbered, open_regular, read_json, writing
from spot_async.base.writers import refuse_foreign_writers
from spot_async.errors import DataError

DIRECTORY = "checkpoints"
FILE = "manifest.json"
FORMAT = 1
DIGEST_BYTES = 16


class CheckpointFile(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    blake2b: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done up to a checkpoint."""

    format: int = FORMAT
    step: int  # iterations that are trained: batches before this one
    lineages: tuple[int, ...]  # the step at which each lineage of weights began, this one's last
    keys: str  # digest of the configuration's keys that decide numbers
    data: str  # digest of the problems, in order
    files: tuple[CheckpointFile, ...] = ()

    @property
    def lineage(self) -> int:
        return len(self.lineages) - 1


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint whose manifest was read."""

    directory: Path
    manifest: Manifest


def beginning(checkpoint: Checkpoint | None, *, keys: str, data: str) -> Manifest:
    """Return the manifest of the part of a run that begins at a checkpoint, or with nothing trained."""
    if checkpoint is None:
        return Manifest(step=0, lineages=(0,), keys=keys, data=data)
    found = checkpoint.manifest
    return Manifest(step=found.step, lineages=(*found.lineages, found.step), keys=keys, data=data)


def checkpoint_directory(run: Path, step: int) -> Path:
    return numbered(run / DIRECTORY, "step", step)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def commit(directory: Path, manifest: Manifest) -> tuple[CheckpointFile, ...]:
    """Write the manifest of a directory whose other files are on disk; return those. Raises StorageError.

    When this returns the checkpoint counts, also after a power cut.
    """
    with writing(directory / FILE):
        files = tuple(_described(path) for path in sorted(directory.iterdir()) if _is_of_checkpoint(path))
        manifest = msgspec.structs.replace(manifest, files=files)
        new, final = directory / f".{FILE}", directory / FILE
        new.write_bytes(as_json(manifest))
        flush_to_disk(new)
        new.replace(final)
        for each in (directory, directory.parent, directory.parent.parent):
            flush_to_disk(each)
    return files


def newest(run: Path) -> Checkpoint:
    """Return the newest checkpoint whose files are as its manifest says, and log those that are passed over.

    Raises DataError where there is none, where others could change them, and for a manifest of a newer program.
    """
    faults: list[str] = []
    for directory in committed(run):
        try:
            refuse_foreign_writers([directory, *filter(Path.is_file, directory.iterdir())])
            return check(directory)
        except DataError as fault:
            faults.append(str(fault))
            structlog.get_logger().warning("checkpoint passed over", reason=str(fault))
    if faults:
        raise DataError(f"{run}: no checkpoint is whole: {'; '.join(faults)}")
    raise DataError(f"{run}: it has no checkpoint to resume from (training.checkpoint_every)")


def committed(run: Path) -> list[Path]:
    """Return the directories that have a manifest, the newest first."""
    return [each for each in reversed(all_numbered(run / DIRECTORY, "step")) if (each / FILE).is_file()]


def check(directory: Path) -> Checkpoint:
    """Return a checkpoint. Raises DataError, which names what is missing or changed."""
    path = directory / FILE
    manifest = read_json(path, Manifest, newest_format=FORMAT)
    for expected in manifest.files:
        if Path(expected.name).name != expected.name:
            raise DataError(f"{path}: names {expected.name!r}, which is no file of its directory")
        try:
            path = directory / expected.name
            is_whole = path.stat().st_size == expected.bytes and _described(path) == expected
        except OSError as error:
            raise DataError(f"{directory / expected.name}: {error.strerror}") from None
        if not is_whole:
            raise DataError(f"{directory / expected.name}: is not what the manifest says: it is damaged")
    return Checkpoint(directory, manifest)


def prune(run: Path, *, keep: int, keep_every: int | None) -> None:
    """Delete checkpoints but the newest `keep`, and those whose step is a multiple of `keep_every`.

    The newest one is checked first. If it is damaged the older ones stay, and the log says so: the run can continue,
    and its next checkpoint may be whole.
    """
    found = committed(run)
    if len(found) <= keep:
        return
    try:
        check(found[0])
    except DataError as fault:
        structlog.get_logger().warning("checkpoint damaged", reason=str(fault), kept=[each.name for each in found[1:]])
        return
    for directory in found[keep:]:
        step = step_of(directory)
        if keep_every is None or step % keep_every:
            (directory / FILE).unlink()  # first, so that half of a checkpoint never counts
            flush_to_disk(directory)  # a power cut must not bring it back: a run may have gone back behind it by then
            shutil.rmtree(directory, ignore_errors=True)


def remove_unfinished(run: Path) -> None:
    """Delete checkpoints whose manifest was never written."""
    for directory in all_numbered(run / DIRECTORY, "step"):
        if not (directory / FILE).exists():
            shutil.rmtree(directory, ignore_errors=True)


def _is_of_checkpoint(path: Path) -> bool:
    """Whether the ranks wrote a file, and not the manifest's writer, the file system or somebody else."""
    return path.is_file() and path.name != FILE and not path.name.startswith(".")


def _described(path: Path) -> CheckpointFile:
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    return CheckpointFile(path.name, path.stat().st_size, digest.hexdigest())
