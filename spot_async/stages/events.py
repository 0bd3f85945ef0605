"""Events that stages publish of their requests, and the clock that learns from them which stage the trainer waits for.

All times are the running loop's, so they are exact on virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spot_async.base.events import Event
from spot_async.errors import FailureClass


class RequestEvent(Event, frozen=True):
    """Something happened to a request. There are many of these: hundreds for each prompt."""


class RequestAsked(RequestEvent, frozen=True):
    """A request is about to enter its stage. The stages' numbers still hold what was true until now."""

    at_s: float


class AttemptFailed(RequestEvent, frozen=True):
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


class RequestEnded(RequestEvent, frozen=True):
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


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which the trainer waited for one stage. Its name is empty if no stage had anything to do."""

    stage: str
    started_s: float
    ended_s: float


class StageLoad(Protocol):
    """What `busiest` reads of a stage."""

    @property
    def name(self) -> str: ...

    @property
    def prompts(self) -> int: ...


def busiest(stages: Sequence[StageLoad]) -> str:
    """Return the stage that most prompts are at, the first of equals; empty when no prompt is at any.

    It counts prompts, not requests: a prompt has one rollout but several probes, and the batch waits for prompts.
    """
    name, most = "", 0
    for stage in stages:  # a plain loop: this runs once a request
        prompts = stage.prompts
        if prompts > most:
            name, most = stage.name, prompts
    return name


class WaitClock:
    """Divides time among stages: each moment belongs to the stage that most prompts were at.

    This is exact. Load changes only when a request is asked or ends, and both are published just before the change.
    What stages hold then has been true since the change before.
    """

    def __init__(self, stages: Sequence[StageLoad]) -> None:
        self._stages = stages
        self._changes: list[tuple[str, float]] = []  # a stage, and since when most prompts were there
        self._until_s = float("-inf")

    def on(self, event: Event) -> None:
        match event:
            case RequestAsked(at_s=at_s) | RequestEnded(ended_s=at_s):
                self._extend(at_s)

    def take(self, started_s: float, ended_s: float) -> list[Wait]:
        """Return what was waited for between two times, in order, and forget everything before the second."""
        waits = self.between(started_s, ended_s)
        self._changes.clear()
        return waits

    def between(self, started_s: float, ended_s: float) -> list[Wait]:
        """Return what was waited for between two times, in order. The second is now or later."""
        self._extend(ended_s)
        ends = [since_s for _, since_s in self._changes[1:]] + [self._until_s]
        return [
            Wait(stage, max(since_s, started_s), min(end_s, ended_s))
            for (stage, since_s), end_s in zip(self._changes, ends, strict=True)
            if end_s > started_s and since_s < ended_s
        ]

    def _extend(self, until_s: float) -> None:
        if until_s <= self._until_s:
            return
        stage = busiest(self._stages)
        if not self._changes or self._changes[-1][0] != stage:
            self._changes.append((stage, self._until_s))
        self._until_s = until_s


def seconds_by_stage(waits: Sequence[Wait]) -> dict[str, float]:
    """Return the seconds waited for each stage; `nothing` has those when no stage had anything to do."""
    totals: dict[str, float] = {}
    for wait in waits:
        name = wait.stage or "nothing"
        totals[name] = totals.get(name, 0.0) + wait.ended_s - wait.started_s
    return totals
