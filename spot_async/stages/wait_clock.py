"""Says which stage the trainer waited for: each moment belongs to the stage that most prompts were at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spot_async.base.events import Event
from spot_async.stages.events import RequestAsked, RequestEnded


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
