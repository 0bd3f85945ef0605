"""Events that stages publish of their requests. All times are the running loop's, so they are exact on virtual time."""

from __future__ import annotations

from spot_async.base.events import Event
from spot_async.errors import FailureClass


class RequestAsked(Event, frozen=True):
    """A request is about to enter its stage. The stages' numbers still hold what was true until now."""

    at_s: float


class AttemptFailed(Event, frozen=True):
    """An attempt of a request has failed."""

    stage: str
    sent_s: float  # when it got a server; the same as `failed_s` if it never did
    failed_s: float
    delay_s: float | None  # until the next attempt; None if there is none
    failure: FailureClass
    brief: str  # what happened: `HTTP 502`, `reset`
    reason: str  # the error's message, of which a part may be a server's words; long ones are cut
    replica: str = ""  # the server that it had; empty where no pool gave it to one

    @property
    def lost_s(self) -> float:
        """What it took of its request's time, with the pause after it."""
        return self.failed_s - self.sent_s + (self.delay_s or 0.0)


class RequestEnded(Event, frozen=True):
    """A request has ended, with all its attempts. It is about to leave its stage, whose numbers still count it."""

    stage: str
    priority: tuple[int, ...]  # starts with the prompt's ordinal
    asked_s: float
    started_s: float  # when it first got a server; the same as `ended_s` if it never did
    ended_s: float
    outcome: str  # "done", "cancelled", or the class of the failure
    replica: str = ""  # the server that had it last; empty where no pool gave it to one
    tokens: int = 0  # that it generated, or of prompt and response that it scored; 0 where they cannot be compared
    failed: tuple[AttemptFailed, ...] = ()  # its attempts that failed, the newest ones if there were many
