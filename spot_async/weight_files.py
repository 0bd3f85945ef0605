"""Which files of a Hugging Face directory hold its weights; deleting one. Reads no tensor and imports no torch."""

from __future__ import annotations

import json
import shutil
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


def delete_weights(directory: Path) -> None:
    """Delete a directory that nobody needs. One that cannot be deleted, as on a busy disk, is logged and stays."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        structlog.get_logger().warning("old weights cannot be deleted", directory=str(directory), error=str(error))
