"""Events that stages publish of their requests. All times are the running loop's, so they are exact on virtual time."""

from __future__ import annotations

from spot_async.base.events import Event


class RequestAsked(Event, frozen=True):
    """A request is about to enter its stage. The stages' numbers still hold what was true until now."""

    at_s: float


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
