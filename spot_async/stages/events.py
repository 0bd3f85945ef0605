"""What stages publish of their requests. All times are the running loop's, so they are exact on virtual time."""

from __future__ import annotations

from spot_async.base.events import Event


class RequestAsked(Event, frozen=True):
    """Published before the request enters its stage, so the stages' numbers still hold what was true until now."""

    at_s: float


class RequestEnded(Event, frozen=True):
    """A request with all its attempts. Published before it leaves its stage, whose numbers still count it."""

    stage: str
    priority: tuple[int, ...]  # starts with the prompt's ordinal
    asked_s: float
    started_s: float  # its turn came: until then it was in the mailbox
    ended_s: float
    outcome: str  # "done", "cancelled", or the class of the failure
    replica: str = ""  # the server that had it last; empty where no pool gave it to one
