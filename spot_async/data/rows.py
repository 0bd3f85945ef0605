"""Reads files of any format and data sets of the hub into plain rows. What the columns mean is not decided here.

A row comes with the place it was read from, so that whatever is wrong with it later can be named.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from spot_async.config import ProblemSetConfig
from spot_async.data.hub import read_hub
from spot_async.data.keys import about, setting
from spot_async.errors import DataError
from spot_async.text import first_line

Columns: TypeAlias = dict[str, Any]

_NO_NUMBER = re.compile(rb"[:,\[]\s*-?(?:NaN|Infinity)\s*[,}\]]")  # what Python's json writes for such floats


class Row(NamedTuple):
    """One row as it stands in its file."""

    where: str  # `FILE:LINE`, for messages
    number: int  # in its file, from 1 on
    columns: Columns


def read_rows(path: str, settings: ProblemSetConfig, key: str) -> Iterator[Row]:
    """The rows of one file, or of a data set on the hub where `path` is none.

    `key` of the configuration names it; empty where there is no configuration.

    Raises DataError for what cannot be read, naming the place.
    """
    file = Path(path)
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    read = _READERS.get(suffix)
    if read is None:
        if file.exists() or path.count("/") != 1 or suffix:
            raise DataError(about(key) + _unknown(path, suffix))
        for number, columns in enumerate(read_hub(path, settings, key), start=1):
            yield Row(f"{path}: row {number}", number, columns)
        return
    if stray := [name for name in ("subset", "split", "revision") if getattr(settings, name) is not None]:
        raise DataError(f"{setting(key, stray[0])}: {path} is a file; only data sets on the hub have one")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{about(key)}cannot read {path}: {error.strerror}") from None
    if file.suffix.lower() == ".gz":
        content = _decompress(content, path, key)
    yield from read(path, content.removeprefix(codecs.BOM_UTF8))


def _unknown(path: str, suffix: str) -> str:
    if Path(path).is_dir():
        return f"{path} is a directory: name the files in it"
    if suffix == ".tsv":
        return f"{path}: tabs between cells are not read: write it with commas, as .csv"
    return f"{path}: neither a file that ends in {', '.join(_READERS)} (or .gz) nor `owner/name` on the hub"


def _decompress(content: bytes, path: str, key: str) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{about(key)}{path} is damaged or cut short: {first_line(error)}; get it again") from None


def _read_jsonl(path: str, content: bytes) -> Iterator[Row]:
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            raise DataError(f"{where}: empty line; each line is one JSON object")
        if number == 1 and line.lstrip().startswith(b"["):
            raise DataError(f"{where}: a list, where each line is one JSON object; a file that is one list is a .json")
        yield Row(where, number, _decode(line, where, Columns))


def _read_json(path: str, content: bytes) -> Iterator[Row]:
    """A list of objects, or an object that holds one such list."""
    found = _decode(content, path, Any)
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else found
    if not isinstance(found, list):
        raise DataError(f"{path}: expected a list of objects, or an object with one list in it")
    for number, columns in enumerate(found, start=1):
        if not isinstance(columns, dict):
            raise DataError(f"{path}: item {number} is no object, but {type(columns).__name__}")
        yield Row(f"{path}: item {number}", number, columns)


def _read_csv(path: str, content: bytes) -> Iterator[Row]:
    csv.field_size_limit(1 << 24)  # the default of 128 KiB is less than some solutions
    try:
        rows = csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True)
        names = rows.fieldnames or ()
        if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
            raise DataError(f"{path}:1: one column, {names[0]!r}: write commas between cells, not {other!r}")
        for number, columns in enumerate(rows, start=1):
            where = f"{path}:{rows.line_num}"
            if None in columns or None in columns.values():
                further = columns.pop(None, [])
                cells = sum(each is not None for each in columns.values()) + len(further)
                remedy = "put cells with commas in double quotes" if further else "correct or remove the row"
                raise DataError(f"{where}: {cells} cells, but the header has {len(names)}: {remedy}")
            yield Row(where, number, dict(columns))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid CSV: {first_line(error)}") from None


def _read_parquet(path: str, content: bytes) -> Iterator[Row]:
    import pyarrow  # slow to import
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches()
        number = 0
        for batch in batches:
            for columns in batch.to_pylist():
                number += 1
                yield Row(f"{path}: row {number}", number, columns)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # OSError: what it says of damaged pages
        raise DataError(f"{path}: not valid Parquet: {first_line(error)}") from None


def _decode(content: bytes, where: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: {first_line(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remedy = "; JSON has no NaN or Infinity: write null" if _NO_NUMBER.search(content) else ""
        raise DataError(f"{where}: not valid JSON: {first_line(error)}{remedy}") from None


_READERS: dict[str, Callable[[str, bytes], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
