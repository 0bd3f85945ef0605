"""The exceptions users can catch: one class for each way of responding.

    SpotError                      raised on purpose; one without a class of its own stops the run
    ├── ConfigError                correct the configuration (exit code 2)
    │   └── FarSideError           at the start as that; later try again, since nothing was started
    ├── DataError                  correct the file (exit code 2)
    ├── StorageError               the run stops: make room, or the directory writable
    ├── RequestError               a request to a server failed
    │   ├── PermanentError         give up the prompt
    │   │   ├── RequestTooLargeError
    │   │   └── VersionMismatchError
    │   ├── ThrottledError         send again when the server allows it
    │   ├── TransientError         send again soon, elsewhere where there is another server
    │   │   ├── DeadlineExceededError
    │   │   ├── UnreachableError
    │   │   └── ServerRestartedError   also enter the server again and send it the weights
    │   └── PoisonedReplyError     send again once
    ├── ProcessDiedError           the run stops: read the log it names
    ├── TrainerError               the run stops: read the message
    │   └── TrainerLostError       the run goes back to its newest checkpoint with another trainer
    ├── PluginError                the run stops: correct the policy or verifier
    │   └── ContractError          likewise: correct what the policy asks of its stages, or says of itself
    ├── ReplayMissError            the run stops: fill the cache with a teacher
    ├── StalledError               the run stops: read the watchdog's report (exit code 3)
    └── BudgetSpentError           the run ends early with all that is finished (exit code 4)

Every message is one line. It names the thing at fault and what to do. A failure of infrastructure never becomes a
reward: it is raised as one of these. Anything that is not a `SpotError` is a bug and stops the run with its trace.
docs/failures.md says in detail how a run responds to each.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

HTTP_ERROR = 400  # statuses from here on are errors
LONG_PAUSE_S = 60.0  # people are told of pauses at least this long
# A longer pause counts as none asked for: no quota that is worth waiting for lasts longer than a day.
LONGEST_PAUSE_S = 86_400.0


class SpotError(Exception):
    """Root of everything spot-async raises on purpose."""


class ConfigError(SpotError):
    """The configuration cannot run: a wrong key, value or combination. Found before anything starts."""


class FarSideError(ConfigError):
    """The command that leads to another machine did not get there, so nothing was started."""


class DataError(SpotError):
    """A problem file, model directory or weight file cannot be used as it is."""


class StorageError(SpotError):
    """The run directory cannot be written: full disk, quota, or gone."""


class FailureClass(StrEnum):
    """Whether sending a failed request again can help. Each class has its own retry budget (`base/retry.py`)."""

    PERMANENT = "permanent"
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    POISONED = "poisoned"


@dataclass(frozen=True)
class Exchange:
    """What was sent and what came back, for people who look into a failed request. Holds no secrets."""

    endpoint: str  # address of the server
    method: str
    path: str
    sent_bytes: int
    sent: Any  # the request's body as plain values, with sampling settings; long lists and texts are cut
    status: int | None = None  # None where there was no reply
    received: str = ""  # head of the reply's body


class RequestError(SpotError):
    """A request to a backend failed. Subclasses say whether sending it again can help.

    The attributes say where it failed. The HTTP client fills in the exchange, and the stage fills in its own name, the
    number of attempts, and whether it had answers meanwhile. None of this is part of the message.
    """

    failure_class: FailureClass = FailureClass.PERMANENT
    exchange: Exchange | None = None
    was_sent: bool = True  # False: it never left this process, so it says nothing about the server
    stage: str | None = None
    attempts: int = 1
    others_answered: bool = False  # True: other requests of its stage were answered since it was sent first
    in_short: str = "refused"  # what happened if the server did not answer with an error

    @property
    def brief(self) -> str:
        """What happened, in a word or three. Equal failures have equal words: `HTTP 502`, `reset`."""
        status = self.exchange.status if self.exchange is not None else None
        return f"HTTP {status}" if status is not None and status >= HTTP_ERROR else self.in_short

    def reworded(self, message: str) -> Self:
        """Return the same failure with another message."""
        again = copy.copy(self)
        again.args = (message,)
        return again


class PermanentError(RequestError):
    """The same request would fail again (bad input, unknown model, vocabulary mismatch). It is never retried."""


class RequestTooLargeError(PermanentError):
    """The request is larger than the server accepts."""


class VersionMismatchError(PermanentError):
    """The server does not hold the weight version that the request asked for.

    `may_pass`: an update is the reason, and a later attempt may be answered. Then it is retried as a `TransientError`.
    """

    in_short = "other weights"

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        if may_pass:
            self.failure_class = FailureClass.TRANSIENT


class ThrottledError(RequestError):
    """The endpoint asks to be left alone for a while (429, 503, 529).

    `asked_s` is the pause that the endpoint asked for. `retry_after_s` is the pause that is kept: None where it
    `asks_too_long`, for more than `LONGEST_PAUSE_S`. A run that paused for a year would have ended without saying so.
    """

    failure_class = FailureClass.THROTTLED
    in_short = "asked to wait"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.asked_s = retry_after_s
        self.asks_too_long = retry_after_s is not None and retry_after_s > LONGEST_PAUSE_S
        self.retry_after_s = None if self.asks_too_long else retry_after_s


class TransientError(RequestError):
    """A reset, a 5xx or a timeout: a later attempt may succeed."""

    failure_class = FailureClass.TRANSIENT
    in_short = "reset"


class DeadlineExceededError(TransientError):
    """The request's absolute deadline, or that of one attempt, passed before it was answered."""

    in_short = "no answer in time"


class UnreachableError(TransientError):
    """Nothing has answered at the server's address since its backend was entered.

    `reason` is the operating system's message.
    """

    in_short = "no connection"

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ServerRestartedError(TransientError):
    """The server was restarted, or somebody else updated it: it may hold weights that this run did not send.

    Another server may answer the request. This one must first be left, entered again and sent the weights.
    """

    in_short = "server restarted"


class PoisonedReplyError(RequestError):
    """The reply's numbers cannot be true (NaN, missing rows, tokens outside the vocabulary)."""

    failure_class = FailureClass.POISONED
    in_short = "bad reply"


class ProcessDiedError(SpotError):
    """A supervised child process ended although the run still needs it."""


class TrainerError(SpotError):
    """The trainer stopped: non-finite loss or gradient, or a full disk. It would again."""


class TrainerLostError(TrainerError):
    """A process of the trainer ended by itself: killed, out of memory, or a bug in a rank."""


class PluginError(SpotError):
    """A policy or verifier of somebody else's broke its contract, or raised. Its author has to mend it.

    `__cause__` is what it raised. The trace is in the run's log.
    """


class ContractError(PluginError):
    """A policy asked for more than its needs state, or gave a field by a name that it had before."""


class ReplayMissError(SpotError):
    """A run without its teacher needs a score that the cache does not hold."""


class StalledError(SpotError):
    """The run made no progress for too long. The watchdog's report says what the run was waiting for."""


class BudgetSpentError(SpotError):
    """The run's budget for requests is spent. Everything that was finished is saved."""
