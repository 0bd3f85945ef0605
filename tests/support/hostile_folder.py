"""A folder with files of a user's, which have the names of modules that programs of ours and of others import."""

from __future__ import annotations

from pathlib import Path

NAMES = ("json", "numpy", "queue", "random", "token", "torch", "types")


def of_common_names(folder: Path) -> Path:
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory')\n")
    return folder
