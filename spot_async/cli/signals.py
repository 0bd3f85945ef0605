"""Decides how a run answers a signal. Pure: handlers and tasks are in `ending.py`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import Enum, auto

# Those by which schedulers and clouds announce that they need the machine. Ctrl-C is a person who wants the end now.
SAVING = frozenset({signal.SIGTERM, signal.SIGUSR1})
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the run is not done, and the same command with --resume continues it


class Answer(Enum):
    SAVE = auto()  # end in order, with a checkpoint of the step that is under way
    CANCEL = auto()  # end in order, as it is
    IGNORE = auto()  # it is ending already
    LEAVE = auto()  # exit at once


def answer_to(number: signal.Signals, earlier: Sequence[signal.Signals], *, can_save: bool, saves: bool) -> Answer:
    """Return what to do about a signal after those that came earlier.

    `can_save`: the run would make a checkpoint if it were asked now. `saves`: it was asked, and ends.
    """
    if not earlier:
        return Answer.SAVE if can_save and number in SAVING else Answer.CANCEL
    if number is signal.SIGHUP:
        return Answer.IGNORE  # when a terminal closes, both the system and the shell may send this
    if saves and number in SAVING and number not in earlier:
        return Answer.IGNORE  # schedulers announce the end by one, and send the other when it comes closer
    return Answer.LEAVE
