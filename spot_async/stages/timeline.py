"""What a run reports of its own time: requests, prompts and phases of the trainer, each once, when it ends.

Stages and the orchestrator report, a request also when it is asked; a `Timeline` listens (the trace file). All times
are the running loop's, so they are exact on virtual time. `WaitClock` says which stage the trainer waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Phase = Literal["wait for batch", "train", "update weights", "evaluate"]  # of an iteration, in order
# What a run waits for in each, in words for people. Where supervision is, the stages tell more.
WAITS_FOR: dict[Phase, str] = {
    "wait for batch": "supervision",
    "train": "the trainer",
    "update weights": "the weight update",
    "evaluate": "the evaluation",
}


class RequestSpan(NamedTuple):
    """One request of a stage, all its attempts included."""

    stage: str
    priority: tuple[int, ...]  # starts with the prompt's ordinal
    asked_s: float
    started_s: float  # its turn came: until then it was in the mailbox
    ended_s: float
    outcome: str  # "done", "cancelled", or the class of the failure
    replica: str = ""  # the server that had it last; empty where no pool gave it to one


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """One prompt's coroutine, from admission until its samples are queued."""

    ordinal: int
    started_s: float
    ended_s: float
    outcome: str  # "queued", "dead", or "unpaid"


@dataclass(frozen=True, slots=True)
class Wait:
    """The trainer waited for this stage. An empty name: no stage had anything to do."""

    stage: str
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase of an iteration, as the trainer goes through it."""

    iteration: int  # the first one is 1
    name: Phase
    started_s: float
    ended_s: float
    ordinals: Sequence[int] = ()  # prompts of the batch, where there is one
    waits: Sequence[Wait] = ()  # of a wait for the batch, in order and without gaps


class Timeline(Protocol):
    """Told what ended; never asked. Must return at once: it runs between requests."""

    def request_asked(self, asked_s: float) -> None:
        """Called before a request enters its stage, so the stages' numbers still hold what was true until now."""
        ...

    def request_ended(self, span: RequestSpan) -> None:
        """Called before the request leaves its stage, so the stage's numbers still hold what was true until now."""
        ...

    def prompt_ended(self, span: PromptSpan) -> None: ...

    def phase_ended(self, span: PhaseSpan) -> None: ...


class Timelines:
    """Passes everything on to any number of listeners, none to begin with."""

    def __init__(self) -> None:
        self._listeners: list[Timeline] = []

    def add(self, listener: Timeline) -> None:
        self._listeners.append(listener)

    def request_asked(self, asked_s: float) -> None:
        for listener in self._listeners:
            listener.request_asked(asked_s)

    def request_ended(self, span: RequestSpan) -> None:
        for listener in self._listeners:
            listener.request_ended(span)

    def prompt_ended(self, span: PromptSpan) -> None:
        for listener in self._listeners:
            listener.prompt_ended(span)

    def phase_ended(self, span: PhaseSpan) -> None:
        for listener in self._listeners:
            listener.phase_ended(span)


class StageLoad(Protocol):
    """What `busiest` reads of a stage."""

    @property
    def name(self) -> str: ...

    @property
    def prompts(self) -> int: ...


def busiest(stages: Sequence[StageLoad]) -> str:
    """The stage that most prompts are at, the first of equals; empty when no prompt is at any.

    Prompts, not requests: a prompt has one rollout but several probes, and the batch waits for prompts.
    """
    name, most = "", 0
    for stage in stages:  # a plain loop: this runs once a request
        prompts = stage.prompts
        if prompts > most:
            name, most = stage.name, prompts
    return name


class WaitClock:
    """Divides time among stages: each moment belongs to the stage that most prompts were at.

    Load changes only when a request is asked or ends. What stages hold just before either has been true since the
    change before it, so these looks are exact.
    """

    def __init__(self, stages: Sequence[StageLoad]) -> None:
        self._stages = stages
        self._changes: list[tuple[str, float]] = []  # a stage, and since when most prompts were there
        self._until_s = float("-inf")

    def request_asked(self, asked_s: float) -> None:
        self._extend(asked_s)

    def request_ended(self, span: RequestSpan) -> None:
        self._extend(span.ended_s)

    def prompt_ended(self, span: PromptSpan) -> None:
        pass

    def phase_ended(self, span: PhaseSpan) -> None:
        pass

    def take(self, started_s: float, ended_s: float) -> list[Wait]:
        """What was waited for between two times; forgets everything before the second."""
        self._extend(ended_s)
        ends = [since_s for _, since_s in self._changes[1:]] + [self._until_s]
        waits = [
            Wait(stage, max(since_s, started_s), min(end_s, ended_s))
            for (stage, since_s), end_s in zip(self._changes, ends, strict=True)
            if end_s > started_s and since_s < ended_s
        ]
        self._changes.clear()
        return waits

    def _extend(self, until_s: float) -> None:
        if until_s <= self._until_s:
            return
        stage = busiest(self._stages)
        if not self._changes or self._changes[-1][0] != stage:
            self._changes.append((stage, self._until_s))
        self._until_s = until_s


def seconds_by_stage(waits: Sequence[Wait]) -> dict[str, float]:
    """Total of each stage; `nothing` for the moments no stage had anything to do."""
    totals: dict[str, float] = {}
    for wait in waits:
        name = wait.stage or "nothing"
        totals[name] = totals.get(name, 0.0) + wait.ended_s - wait.started_s
    return totals
