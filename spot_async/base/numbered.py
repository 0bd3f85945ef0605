"""Names of directories of which there is one for each step: `step-000012`. Other names beside them are people's own."""

from __future__ import annotations

import re
from pathlib import Path


def numbered(parent: Path, kind: str, number: int) -> Path:
    """Return the path of a directory: `parent/kind-000012`."""
    return parent / f"{kind}-{number:06d}"


def number_of(path: Path, kind: str) -> int | None:
    """Return the number in a name that `numbered` gives; None for any other name, such as that of a copy."""
    found = re.fullmatch(rf"{re.escape(kind)}-([0-9]{{6,}})", path.name)
    return int(found[1]) if found is not None and numbered(path.parent, kind, int(found[1])) == path else None


def all_numbered(parent: Path, kind: str, *, above: int = -1) -> list[Path]:
    """Return the directories of a kind with numbers above `above` that are there, the lowest number first."""
    found = {number_of(path, kind): path for path in parent.glob(f"{kind}-*") if path.is_dir()}
    return [path for number, path in sorted((n, p) for n, p in found.items() if n is not None and n > above)]
