"""The screen of a command: what it cannot show or no longer takes must not end what works."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

# What stands for our own characters on a screen that has only others. Any other character becomes a question mark.
NEAREST = {"·": "-", "–": "-", "—": "-", "−": "-", "±": "+-", "×": "x", "…": "...", "“": '"', "”": '"', "’": "'",
           "█": "#", "░": ".", "▏": "|", "▸": ">", "→": "->", "≥": ">=", "≤": "<="}  # fmt: skip


class Screen(Console):
    """A console that falls silent when it can no longer write, so that the command still ends as it would.

    That is so behind `head`, on a terminal that was closed, and on a full disk.
    """

    def __exit__(self, *exc_info: Any) -> None:  # every way of printing ends here
        try:
            super().__exit__(*exc_info)
        except (OSError, ValueError):  # rich itself only handles broken pipes; a file that was closed is a ValueError
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if self.file.closed:
            return
        with Path(os.devnull).open("wb") as nowhere:  # takes what Python has buffered, and writes when it ends
            os.dup2(nowhere.fileno(), self.file.fileno())


def show_nearest_characters() -> None:
    """Let this process's screens replace what their encoding cannot express."""
    codecs.register_error("nearest", _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(NEAREST.get(each, "?") for each in error.object[error.start : error.end]), error.end
