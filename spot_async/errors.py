"""The exceptions users can catch, one class per way of responding to it.

Every message is one line that names the thing at fault and what to do. An infrastructure failure is
never turned into a reward: it is raised as one of these and handled by its class. Anything that is
not a `SpotError` is a bug and stops the run with its trace.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Self

LONG_PAUSE_S = 60.0  # people are told of pauses from this on
LONGEST_PAUSE_S = 86_400.0  # that is kept: no quota that could be waited for is longer than a day's


class SpotError(Exception):
    """Root of everything spot-async raises on purpose."""


class ConfigError(SpotError):
    """A configuration that cannot run: wrong key, value or combination. Found before anything starts."""


class DataError(SpotError):
    """A problem file, model directory or weight file that cannot be used as it stands."""


class StorageError(SpotError):
    """The run directory cannot be written: full disk, quota, or gone."""


class FailureClass(StrEnum):
    """What another sending of a failed request would change; each class has a budget of its own (`base/retry.py`)."""

    PERMANENT = "permanent"
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    POISONED = "poisoned"


@dataclass(frozen=True)
class Exchange:
    """What was sent and what came back, as far as people need it to see why a request failed. Holds no secrets."""

    endpoint: str  # address of the server
    method: str
    path: str
    sent_bytes: int
    sent: Any  # the request's body as plain values, long lists and texts cut; sampling settings are in it
    status: int | None = None  # None where there was no reply
    received: str = ""  # head of the reply's body


class RequestError(SpotError):
    """A request to a backend failed. Subclasses say whether sending it again can help.

    Where it failed is filled in on the way up: the exchange at the edge, the stage and how often it sent the request
    by the stage. None of it is part of the message.
    """

    failure_class: ClassVar[FailureClass] = FailureClass.PERMANENT
    exchange: Exchange | None = None
    was_sent: bool = True  # False: it never left, and tells nothing of the server
    stage: str | None = None
    attempts: int = 1

    def reworded(self, message: str) -> Self:
        """The same failure under another message."""
        again = copy.copy(self)
        again.args = (message,)
        return again


class PermanentError(RequestError):
    """The same request would fail again (bad input, unknown model, vocabulary mismatch): never retried."""


class RequestTooLargeError(PermanentError):
    """The request has more bytes than the server reads."""


class VersionMismatchError(PermanentError):
    """The server no longer holds the weight version that the request asked for."""


class ThrottledError(RequestError):
    """The endpoint asks to be left alone for a while (429, 503, 529).

    A pause of a year would only be a run that ended without a word. So one of more than `LONGEST_PAUSE_S` is not kept:
    `asked_s` is what was asked for, `retry_after_s` what is waited for.
    """

    failure_class = FailureClass.THROTTLED

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.asked_s = retry_after_s
        is_kept = retry_after_s is not None and retry_after_s <= LONGEST_PAUSE_S
        self.retry_after_s = retry_after_s if is_kept else None


class TransientError(RequestError):
    """A reset, a 5xx or a time-out: a later attempt may succeed."""

    failure_class = FailureClass.TRANSIENT


class DeadlineExceededError(TransientError):
    """The request's absolute deadline passed before it was answered."""


class UnreachableError(TransientError):
    """Nothing answers at the server's address, and nothing has since it was entered; `reason` is the system's."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ServerRestartedError(TransientError):
    """The server is not the one that was entered, or holds weights that this run did not give it.

    It was restarted, or updated by somebody else. Another server may answer the request; this one must be left,
    entered again and given weights first.
    """


class PoisonedReplyError(RequestError):
    """A reply whose numbers cannot be true (NaN, rows missing, tokens out of the vocabulary)."""

    failure_class = FailureClass.POISONED


class ProcessDiedError(SpotError):
    """A supervised child process ended although the run still needs it."""


class TrainerError(SpotError):
    """The trainer stopped: non-finite loss or gradient, full disk, or a bug in a rank."""


class PluginError(SpotError):
    """Somebody's policy or verifier does not keep its contract, or raises; its author's to mend.

    What it raised is the cause. The trace is in the run's log.
    """


class ReplayMissError(SpotError):
    """A run without its teacher needs what the cache does not hold."""


class StalledError(SpotError):
    """Nothing was committed for so long that nothing will be; the watchdog says what the run waited for."""


class BudgetSpentError(SpotError):
    """What the run may spend on requests is spent. Everything finished until then is saved."""
