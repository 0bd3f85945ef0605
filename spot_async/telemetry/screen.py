"""The screen of a command: what it cannot show or no longer takes must not end what works."""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from spot_async.base.secrets import SECRETS
from spot_async.base.text import visible

# What stands for our own characters on a screen that has only others. Any other character becomes a question mark.
NEAREST = {"·": "-", "–": "-", "—": "-", "−": "-", "±": "+-", "×": "x", "…": "...", "“": '"', "”": '"', "’": "'",
           "█": "#", "░": ".", "▏": "|", "▸": ">", "→": "->", "≥": ">=", "≤": "<="}  # fmt: skip


LAST_LINES_S = 5.0
MOST_WAITING = 1000  # pieces of output behind a reader who takes nothing


def shown(text: str, style: str = "") -> Text:
    """Return text from files or arguments for the terminal, so that it cannot command it."""
    return Text(visible(text), style)


def number_table(*headings: str, title: str | None = None) -> Table:
    """Return a table for names, in its first column, and numbers. They are folded on narrow screens, not cut."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold")
    return table


class Screen(Console):
    """A console that falls silent when it can no longer write, so that the command still ends as it would.

    That is so behind `head`, on a terminal that was closed, and on a full disk. What servers, models and files say may
    hold characters that terminals obey. They are shown as symbols, wherever they are printed, and keys as asterisks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, **options})  # brackets of a foreign text are its own

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(_without_keys, objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_harmless = segment.control or segment.text.isprintable() or segment.text == "\n"
            yield segment if is_harmless else Segment(visible(segment.text), segment.style)

    def __exit__(self, *exc_info: Any) -> None:  # every way of printing ends here
        try:
            super().__exit__(*exc_info)
        except (OSError, ValueError):  # rich itself only handles broken pipes; a file that was closed is a ValueError
            self.on_broken_pipe()

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Print on a thread of its own while inside, so that a reader who takes nothing holds up nobody.

        What such a reader has not taken soon after the end is given up, and the screen falls silent.
        """
        before, relay = self._file, Relay(cast(TextIO, self.file))
        self.file = cast(TextIO, relay)
        try:
            yield
        finally:
            is_taken = relay.finish(LAST_LINES_S)
            self._file = before
            if not is_taken:
                self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if self.file.closed:
            return
        with Path(os.devnull).open("wb") as nowhere:  # takes what Python has buffered, and writes when it ends
            os.dup2(nowhere.fileno(), self.file.fileno())


def _without_keys(said: Any) -> Any:
    match said:
        case str():
            return SECRETS.struck_text(said)
        case Text() if (struck := SECRETS.struck_text(said.plain)) != said.plain:
            return Text(struck, said.style)
    return said


class Relay:
    """A text file in front of another one, which a thread writes. Too much that waits is left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: SimpleQueue[str | None] = SimpleQueue()
        self._error: OSError | ValueError | None = None
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        stream.flush()
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Take the text. Raises what an earlier one has met with."""
        if self._error is not None:
            raise self._error
        if self._texts.qsize() < MOST_WAITING:
            self._texts.put(text)
        return len(text)

    def flush(self) -> None:
        pass  # the thread does

    def finish(self, seconds: float) -> bool:
        """Return whether everything was taken within this time."""
        self._texts.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (text := self._texts.get()) is not None:
            if self._error is None:
                try:
                    self._show(text)
                except (OSError, ValueError) as error:
                    self._error = error

    def _show(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except OSError:  # a file of Python's own
            self._stream.write(text)
            return
        # Past the stream's buffer, whose lock Python would wait for when it exits.
        data = text.encode(self._stream.encoding, self._stream.errors or "strict")
        while data:
            data = data[os.write(descriptor, data) :]


def show_nearest_characters() -> None:
    """Let this process's screens replace what their encoding cannot express."""
    codecs.register_error("nearest", _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(NEAREST.get(each, "?") for each in error.object[error.start : error.end]), error.end
