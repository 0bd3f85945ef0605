"""Finds the weight files of a Hugging Face directory, makes, holds and deletes such directories, and notices changes.

A server reads weights later than the trainer wrote them, and a server that is started again much later. Between these,
another process of the same user could change them; other users cannot (`base/writers.py`). This reads no tensor and
imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from spot_async.base.files import decode_json, flush_to_disk, open_regular, read_json, reading, refuse_pointer
from spot_async.base.writers import refuse_foreign_writers
from spot_async.errors import DataError
from spot_async.types import WeightFile, WeightSnapshot

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER = "adapter"  # the directory of published weights that holds their adapter
ADAPTER_CONFIG = "adapter_config.json"  # in it
# Older checkpoints have these buffers, which models compute: of rotary positions, causal masks and counted positions.
COMPUTED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|(cos|sin)_cached)|(attn|attention)\.(masked_)?bias|causal_mask|position_ids)$"
)

Shapes = dict[str, tuple[int, ...]]
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
        "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64}  # fmt: skip
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
TORCH_TYPES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
               "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
               "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64"}  # fmt: skip
MAX_HEADER_BYTES = 16 << 20  # of 100,000 tensors


class _Tensor(msgspec.Struct):
    """A tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    """What is read of an index: the file of each tensor."""

    weight_map: dict[str, str]


class Header(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: str  # as safetensors spells it, such as BF16
    shape: tuple[int, ...]
    begin: int = 0  # where the file has its bytes
    size_bytes: int = 0


def weight_files(directory: Path) -> list[Path]:
    """Return the directory's safetensors files.

    Raises `DataError` when there are none, when the index is unusable or leaves readers a choice, or when another user
    could change them.
    """
    single, index, names = directory / SINGLE_FILE, directory / INDEX_FILE, [SINGLE_FILE]
    if index.is_file():
        refuse_foreign_writers([directory, index])
        refuse_pointer(index)
        found = read_json(index, _Index, otherwise="is no index of safetensors files")
        names = sorted({*found.weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise DataError(f"{index}: names files outside its directory")
    elif not single.is_file():
        raise DataError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    files = [directory / name for name in names]
    if single.is_file() and files != [single]:  # transformers reads the one, vLLM what the index names
        raise DataError(f"{directory}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not meant")
    refuse_foreign_writers([directory, *files])
    for file in filter(Path.is_file, files):
        refuse_pointer(file)
    return files


def has_weights(directory: Path) -> bool:
    """Whether a directory that was published holds whole weights, and not an adapter alone."""
    return (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file()


def same_weights(one: Path, other: Path) -> bool:
    """Whether two model directories hold the same weights. Each file is read up to the first difference."""
    if one.samefile(other) or not has_weights(one):
        return one.samefile(other)
    names = [path.name for path in weight_files(one)]
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def weight_headers(directory: Path) -> dict[str, Header]:
    """Return what the headers of a directory's files say of its weights, by name.

    Raises `DataError`, also for a tensor that is in two files: readers take the last, whatever the index says.
    """
    headers: dict[str, Header] = {}
    for path in weight_files(directory):
        if not path.exists():
            raise DataError(f"{directory}: {INDEX_FILE} names {path.name}, which is not there")
        found = file_headers(path)
        if twice := headers.keys() & found.keys():
            raise DataError(
                f"{path}: tensor {min(twice)!r} is in another file of {directory} too; take one of them out"
            )
        headers |= found
    return headers


def file_headers(path: Path) -> dict[str, Header]:
    """Return what a safetensors file's header says of its tensors, by name.

    Raises `DataError` for what is none: as safetensors has it, tensors follow each other without holes, to the end.
    """
    where = f"{path}: is no safetensors file"
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > size:
            raise DataError(f"{where}: its header would be longer than the file")
        if length > MAX_HEADER_BYTES:
            raise DataError(f"{where}: its header has more than {MAX_HEADER_BYTES:,} bytes")
        found = decode_json(file.read(length), dict[str, msgspec.Raw], where)
    found.pop("__metadata__", None)
    tensors = {name: decode_json(bytes(each), _Tensor, f"{where}: {name!r}") for name, each in found.items()}
    headers, end = {}, 0
    for name, each in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, after = each.data_offsets
        if begin != end or after < begin or any(width < 0 for width in each.shape):
            raise DataError(f"{where}: tensor {name!r} overlaps another, or leaves a hole")
        bits = 8 * (after - begin)
        if each.dtype in BITS and bits != BITS[each.dtype] * math.prod(each.shape):
            raise DataError(f"{where}: tensor {name!r} has {after - begin} bytes, which its shape does not have")
        headers[name] = Header(each.dtype, each.shape, 8 + length + begin, after - begin)
        end = after
    if size < 8 + length + end:
        raise DataError(f"{path}: is cut off: it has {size} of {8 + length + end} bytes")
    if size > 8 + length + end:
        raise DataError(f"{where}: it has {size} bytes, and by its header {8 + length + end}")
    return headers


def weight_shapes(directory: Path) -> Shapes:
    """Return the shapes of the directory's weights by name, from the headers of its files. Raises `DataError`."""
    return {name: each.shape for name, each in weight_headers(directory).items()}


def names_in_model(found: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Return the files' names of tensors by their names in a model, without buffers that it computes.

    The files of a base model lack its prefix. Names that are not the model's stay as they are, and so does one without
    a prefix beside the same with it.
    """
    prefixes = sorted({name.partition(".")[0] for name in own})
    names = {}
    for name in found:
        inside = next((f"{prefix}.{name}" for prefix in prefixes if f"{prefix}.{name}" in own), None)
        if name not in own and inside is not None and inside not in found:
            names[inside] = name
        elif name in own or not COMPUTED.search(name):
            names[name] = name
    return names


@contextlib.contextmanager
def complete_directory(final: Path, *, is_durable: bool = True) -> Iterator[Path]:
    """Make a directory to fill with files, and name it `final` once it is complete.

    Until then it is a hidden sibling, so a reader sees all of `final` or nothing. Where it `is_durable`, this holds
    after a power cut too: its files are flushed to disk before it is renamed. If filling it fails, nothing is left.
    """
    partial = final.with_name(f".{final.name}")
    if partial.exists():  # left by a process that was killed
        shutil.rmtree(partial)
    try:
        partial.mkdir()
        yield partial
        if is_durable:
            flush_directory(partial)
        partial.rename(final)
        if is_durable:
            flush_to_disk(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep `delete_weights`, in any process, from deleting the directory during the `with` block.

    The hold also ends with this process. Without the directory, or without locks in its file system, this does nothing.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(_opened(stack, directory), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def delete_weights(directory: Path) -> None:
    """Delete a directory unless it is `in_use`. If that fails, as on a busy disk, the failure is logged."""
    try:
        with contextlib.ExitStack() as stack:
            descriptor = _opened(stack, directory)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:  # a file system without locks
                pass
            # A kill or a power cut leaves a whole directory of this name, or none: whoever resumes takes it as it is.
            hidden = directory.with_name(f".{directory.name}")
            directory.rename(hidden)
            flush_to_disk(hidden.parent)
            shutil.rmtree(hidden)
    except OSError as error:
        structlog.get_logger().warning("old weights cannot be deleted", directory=str(directory), error=str(error))


def flush_directory(directory: Path) -> None:
    """Return once all that is in the directory, and its name, would outlive a power cut."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        flush_to_disk(path)


def _opened(stack: contextlib.ExitStack, directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


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
        yield from filter(Path.is_file, (place / INDEX_FILE, place / ADAPTER_CONFIG))


def _mark(directory: Path, path: Path) -> WeightFile:
    found = path.stat()
    name = path.relative_to(directory).as_posix()
    return WeightFile(name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
