"""Finds the line that says why a program ended among the last that it wrote.

Interpreters and libraries write more after it: warnings, leaked resources, traces of what failed while they came down.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

WAS_KILLED = "was killed by"
LINE_CHARACTERS = 300
LAST_WORDS = 5  # lines at the end, but for the above, that are searched for an error
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Matches at the start of a line or after a logger's prefix only, since a warning may quote an exception.
_ERROR = re.compile(r"(?:^|[\])]:? )((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .*|(?:[\w. -]+: )?error: .*)")
_ASIDE = re.compile(r"\b\w*(?:Warning|WARNING)\b|^(?:\([^)]*\) )?(?:INFO|DEBUG)\b|\bresource_tracker\b")
_TRACE = "Traceback (most recent call last):"
_IGNORED = re.compile(r"Exception ignored in")  # a trace follows of what ended nothing


def how_it_ended(code: int, reason: str) -> str:
    """Say how a program ended: by a signal, which a code below 0 is, or by itself, for a reason that it may have said.

    Where other programs only lost their connections to a killed one, it is the cause.
    """
    if code < 0:
        return f"{WAS_KILLED} {signal.Signals(-code).name}"
    return f"exited with code {code}: {reason}" if reason else f"exited with code {code}"


def readable(text: str) -> list[str]:
    """Return the lines that are not empty, without terminal colours and old progress bars, and none too long."""
    lines = (_ESCAPE.sub("", line.rstrip().rpartition("\r")[2]) for line in text.split("\n"))
    return [line[:LINE_CHARACTERS] for line in lines if line.strip()]


def error_in(line: str) -> str | None:
    """Return the exception's type and message that a line holds, without a logger's prefix; None if it has none."""
    found = _ERROR.search(line)
    return found and found[1]


def headline(lines: Sequence[str]) -> str:
    """Return which of a program's last lines says why it ended: the last error among them, or else the last line.

    Empty if there are no lines.
    """
    said = list(_own_words(lines))[-LAST_WORDS:]
    errors = [line for line, is_error in said if is_error]
    return next(reversed(errors or [line for line, _ in said] or lines), "")


def _own_words(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each line that may be a reason, and whether it is an error: what a trace ends with, or says so itself."""
    prefix: str | None = None  # of each line of the trace that is being read, such as a logger's
    is_ignored = False
    for line in lines:
        if _IGNORED.match(line):
            is_ignored = True
        elif (at := line.find(_TRACE)) >= 0:
            prefix = line[:at]
        elif not (body := line.removeprefix(prefix or "")) or body[0].isspace():
            continue  # of a trace, a warning or a longer message
        elif prefix is not None:
            if not is_ignored:
                yield line, True
            prefix, is_ignored = None, False
        elif error_in(line) is not None:
            yield line, True
        elif not _ASIDE.search(line):
            yield line, False
