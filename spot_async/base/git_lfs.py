"""Tells a file from Git LFS's pointer to it, which `git clone` leaves where LFS is not installed."""

from __future__ import annotations

from pathlib import Path

from spot_async.base.bounded_files import open_regular
from spot_async.errors import DataError

BEGINNING = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raise `DataError` if a file is a pointer in place of what it should hold."""
    try:
        with open_regular(path) as file:
            is_pointer = file.read(len(BEGINNING)) == BEGINNING
    except OSError:
        return  # whoever reads it says why it cannot
    if is_pointer:
        raise DataError(
            f"{path}: is a Git LFS pointer, and not the file itself: run `git lfs pull` in {path.parent} "
            "(with git-lfs installed)"
        )
