"""Reads files of any format, and data sets of the hub, into plain rows. What the columns mean is not decided here.

Each row has the place it was read from, so that messages can name it. Files are read as streams and rows are limited in
size, because a few megabytes of gzip can hold gigabytes. No code of a data set of the hub is executed.
"""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO, Generic, NamedTuple, Self, TypeAlias, cast

import msgspec

from spot_async.base.files import open_regular, refuse_pointer
from spot_async.base.text import first_line, kind_of_value
from spot_async.config import ProblemSetConfig
from spot_async.data.keys import about, setting
from spot_async.errors import DataError
from spot_async.models.hub import the_hub

Columns: TypeAlias = dict[str, Any]

MAX_ROW_BYTES = 16 << 20  # as encoded in the file; worked solutions of a million characters fit
MAX_INFLATED_BYTES = 256 << 20  # of a .gz whose format must be in memory as a whole
MAX_VALUES = 4_000_000  # of a .json
_LONGEST_LITERAL_CHARS = 1 << 20
_BATCH_ROWS = 1024  # rows of Parquet that are Python objects at the same time

_NO_NUMBER = re.compile(rb"[:,\[]\s*-?(?:NaN|Infinity)\s*[,}\]]")  # Python's json writes these, but JSON has no such
CONNECT_TIMEOUT_S = 10.0  # to ask, once and first: the library retries for long when it cannot reach the hub


class Row(NamedTuple):
    """One row as it stands in its file."""

    where: str  # `FILE:LINE`, for messages
    number: int  # in its file, from 1 on
    columns: Columns


def read_rows(path: str, settings: ProblemSetConfig, key: str) -> Iterator[Row]:
    """Yield the rows of one file, or of a data set on the hub if `path` is not a file.

    `key` is the configuration key for messages, empty where there is no configuration. Raises DataError naming the
    place that cannot be read.
    """
    file = Path(path)
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    read = _READERS.get(suffix)
    if read is None:
        if file.exists() or path.count("/") != 1 or Path(path.partition("@")[0]).suffix:
            raise DataError(about(key) + _unknown(path, suffix))
        for number, columns in enumerate(read_hub(path, settings, key), start=1):
            yield Row(f"{path}: row {number}", number, columns)
        return
    if stray := [name for name in ("subset", "split") if getattr(settings, name) is not None]:
        raise DataError(f"{setting(key, stray[0])}: {path} is a file; only data sets on the hub have one")
    refuse_pointer(file)
    try:
        with open_regular(file) as opened:
            stream = gzip.GzipFile(fileobj=opened) if file.suffix.lower() == ".gz" else opened
            yield from read(path, cast("BinaryIO", stream))
    except (OSError, EOFError, zlib.error) as error:
        if strerror := getattr(error, "strerror", None):
            counted = "" if file.is_absolute() or file.exists() else f"; paths count from {Path.cwd()}"
            raise DataError(f"{about(key)}cannot read {path}: {strerror}{counted}") from None
        raise DataError(f"{about(key)}{path} is damaged or cut short: {first_line(error)}; get it again") from None


def _unknown(path: str, suffix: str) -> str:
    if Path(path).is_dir():
        return f"{path} is a directory: name the files in it"
    if suffix == ".tsv":
        return f"{path}: tabs between cells are not read: write it with commas, as .csv"
    return f"{path}: neither a file that ends in {', '.join(_READERS)} (or .gz) nor `owner/name` on the hub"


class _RowLines(Generic[AnyStr]):
    """The lines of a file. The lines of one row may not be longer than `MAX_ROW_BYTES` together."""

    def __init__(self, stream: IO[AnyStr], path: str) -> None:
        self._stream: IO[AnyStr] = stream
        self._path = path
        self._read = 0  # lines so far
        self.begin_row()

    def begin_row(self) -> None:
        self._taken = 0
        self._first = self._read + 1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyStr:
        line = self._stream.readline(MAX_ROW_BYTES + 1 - self._taken)
        self._taken += len(line)
        if self._taken > MAX_ROW_BYTES:
            raise DataError(
                f"{self._path}:{self._first}: a row of more than {MAX_ROW_BYTES:,} bytes, longer than any problem: "
                "correct or remove it"
            )
        if not line:
            raise StopIteration
        self._read += 1
        return line


def _read_jsonl(path: str, stream: BinaryIO) -> Iterator[Row]:
    lines: _RowLines[bytes] = _RowLines(stream, path)
    number = 0
    for text in lines:
        lines.begin_row()
        for line in (text if number else text.removeprefix(codecs.BOM_UTF8)).splitlines():
            number += 1
            where = f"{path}:{number}"
            if not line.strip():
                raise DataError(f"{where}: empty line; each line is one JSON object")
            if number == 1 and line.lstrip().startswith(b"["):
                raise DataError(
                    f"{where}: a list, where each line is one JSON object; a file that is one list is a .json"
                )
            yield Row(where, number, _decode(line, where, Columns))


def _whole(path: str, stream: BinaryIO) -> bytes:
    """Return a file's whole content. No more than `MAX_INFLATED_BYTES` are read."""
    is_compressed = isinstance(stream, gzip.GzipFile)
    content = stream.read(MAX_INFLATED_BYTES + 1)
    if len(content) > MAX_INFLATED_BYTES:
        said = " once it is inflated: write it as .jsonl.gz" if is_compressed else ": write it as .jsonl"
        raise DataError(f"{path}: more than {MAX_INFLATED_BYTES >> 20} MiB{said}, which is read line by line")
    return content


def _read_json(path: str, stream: BinaryIO) -> Iterator[Row]:
    """Read a list of objects, or an object that holds one such list."""
    content = _whole(path, stream).removeprefix(codecs.BOM_UTF8)
    if max(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise DataError(f"{path}: more than {MAX_VALUES:,} values: write it as .jsonl, which is read line by line")
    found = _decode(content, path, Any)
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else found
    if not isinstance(found, list):
        raise DataError(f"{path}: expected a list of objects, or an object with one list in it")
    for number, columns in enumerate(found, start=1):
        if not isinstance(columns, dict):
            raise DataError(f"{path}: item {number} is no object, but {kind_of_value(columns)}")
        yield Row(f"{path}: item {number}", number, columns)


def _read_csv(path: str, stream: BinaryIO) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)  # some solutions are longer than the default of 128 KiB
    lines: _RowLines[str] = _RowLines(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), path)
    try:
        rows = csv.DictReader(lines, strict=True)
        names = rows.fieldnames or ()
        if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
            raise DataError(f"{path}:1: one column, {names[0]!r}: write commas between cells, not {other!r}")
        for number, columns in enumerate(rows, start=1):
            lines.begin_row()
            where = f"{path}:{rows.line_num}"
            if None in columns or None in columns.values():
                further = columns.pop(None, [])
                cells = sum(each is not None for each in columns.values()) + len(further)
                remedy = "put cells with commas in double quotes" if further else "correct or remove the row"
                raise DataError(f"{where}: {cells} cells, but the header has {len(names)}: {remedy}")
            yield Row(where, number, dict(columns))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid CSV: {first_line(error)}") from None


def _read_parquet(path: str, stream: BinaryIO) -> Iterator[Row]:
    import pyarrow  # slow to import
    from pyarrow import parquet

    source = pyarrow.BufferReader(_whole(path, stream)) if isinstance(stream, gzip.GzipFile) else stream
    try:
        schema = parquet.ParquetFile(source).schema
        columns_of_bytes = (schema.column(each) for each in range(len(schema)))
        texts = [each.path for each in columns_of_bytes if each.physical_type == "BYTE_ARRAY"]
        # Texts stay as they are in the file, once for all rows that have them: a few bytes may say one a million times.
        file = parquet.ParquetFile(source, read_dictionary=texts)
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            if group.total_byte_size > max(1, group.num_rows) * MAX_ROW_BYTES:
                raise DataError(f"{path}: rows of more than {MAX_ROW_BYTES:,} bytes, longer than any problem")
            if group.total_byte_size > MAX_INFLATED_BYTES:
                raise DataError(
                    f"{path}: a row group of more than {MAX_INFLATED_BYTES >> 20} MiB: write fewer rows in each "
                    "(row_group_size)"
                )
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            if batch.nbytes > MAX_INFLATED_BYTES:
                raise DataError(f"{path}: rows after {number} of more than {MAX_INFLATED_BYTES >> 20} MiB together")
            at_once = _BATCH_ROWS if batch.nbytes <= MAX_ROW_BYTES else 1
            for begin in range(0, batch.num_rows, at_once):
                for columns in batch.slice(begin, at_once).to_pylist():
                    number += 1
                    yield Row(f"{path}: row {number}", number, columns)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # it raises OSError for damaged pages
        raise DataError(f"{path}: not valid Parquet: {first_line(error)}") from None


def literal(text: str) -> Any:
    """Return the list or object that a text spells in JSON, or in Python's own spelling; None if it spells neither."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "{}") or len(text) > _LONGEST_LITERAL_CHARS:
        return None
    for read in (msgspec.json.decode, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, msgspec.DecodeError):
            continue
        return found if isinstance(found, list | dict) else None
    return None


def only_value(found: object) -> object:
    """Return what a list of one holds. Anything else is returned as it is."""
    return (
        found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | int | float) else found
    )


def _decode(content: bytes, where: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: {first_line(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remedy = "; JSON has no NaN or Infinity: write null" if _NO_NUMBER.search(content) else ""
        raise DataError(f"{where}: not valid JSON: {first_line(error)}{remedy}") from None
    except RecursionError:
        raise DataError(
            f"{where}: lists or objects stand too deep within each other: correct or remove the row"
        ) from None


_READERS: dict[str, Callable[[str, BinaryIO], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def read_hub(path: str, settings: ProblemSetConfig, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the data set `name@revision`. Raises DataError if it does not exist or cannot be reached."""
    import datasets  # slow to import

    name, _, revision = path.partition("@")
    _require_answer(name, key)
    try:
        found = datasets.load_dataset(
            name, name=settings.subset, split=settings.split, revision=revision or None, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - whatever the hub, the network and a data set's files may raise
        raise DataError(
            f"{about(key)}cannot load {name}, no file here, from {the_hub()}: {first_line(error)}"
        ) from None
    if isinstance(found, dict):
        if len(found) > 1:
            raise DataError(f"{setting(key, 'split')}: required for {name}, one of: {', '.join(map(str, found))}")
        (found,) = found.values()
    if datasets.config.HF_HUB_OFFLINE and revision:
        # Offline, the library takes the newest in its cache regardless. Its folders are named after commits.
        cached = {Path(file["filename"]).parent.name for file in found.cache_files}
        if cached != {revision}:
            raise DataError(
                f"{setting(key, 'path')}: {revision} of {name} is not the newest copy in the cache, which is of "
                f"{', '.join(sorted(cached)) or 'no commit'}; name that commit, or unset HF_HUB_OFFLINE"
            )
    for columns in found:
        yield dict(columns)


def _require_answer(name: str, key: str) -> None:
    """Raise DataError unless the hub answers. In offline mode, do not ask.

    Any answer except a server error will do: `load_dataset` says itself why a data set is refused.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if datasets.config.HF_HUB_OFFLINE:
        return
    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(name, timeout=CONNECT_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - which library connects, and so what it raises, the hub's client decides
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return
        raise DataError(
            f"{about(key)}{name} is no file here, and cannot be had from {the_hub()}: {first_line(error)}; check path "
            "and network, or set HF_HUB_OFFLINE=1 to use a copy in the cache"
        ) from None
