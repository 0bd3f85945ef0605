"""Events that a run publishes, beside those of its stages: steps, prompts, phases, iterations.

All times are the running loop's, so they are exact on virtual time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spot_async.base.events import Channel, Event
from spot_async.errors import BudgetSpentError, RequestError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.admission import AdmissionBook, PromptState
from spot_async.stages.events import Wait
from spot_async.stages.stage import Stage
from spot_async.stages.stages import Stages
from spot_async.types import Prompt, Sample, TrainReport, WeightSnapshot, WeightVersion

# The train pump goes from "wait for batch" to "evaluate" in each iteration; it waits in the last two until weights that
# are new enough are served. The publish pump goes from "wait for weights" to "evaluate" for each weights that it sends.
# Each pump is in one phase at a time.
Pump = Literal["train", "publish"]
Phase = Literal["wait for batch", "train", "wait for weights", "write weights", "drain", "update weights", "evaluate"]
# What a pump waits for in each phase, in words for people. Stages tell more about supervision.
WAITS_FOR: dict[Phase, str] = {
    "wait for batch": "supervision",
    "train": "the training step",
    "wait for weights": "new weights",
    "write weights": "the weights to be on disk",
    "drain": "requests under way, before the weight update",
    "update weights": "the weight update",
    "evaluate": "the evaluation",
}


@dataclass
class OrchestratorState:
    """What a console may read at any time."""

    iteration: int = 0  # how many are finished
    spent: BudgetSpentError | None = None  # why nothing is admitted any more
    stopped: bool = False  # somebody asked for the end: no step begins any more
    running: dict[int, Prompt] = field(default_factory=dict)  # being supervised, by ordinal


class TrainingView(Protocol):
    """What listeners may read of a run while it trains, at any time. They change nothing."""

    @property
    def state(self) -> OrchestratorState: ...

    @property
    def stages(self) -> Stages: ...

    @property
    def book(self) -> AdmissionBook: ...

    @property
    def is_strict(self) -> bool: ...

    @property
    def trained(self) -> WeightVersion: ...

    @property
    def served(self) -> WeightVersion: ...


class RunEvent(Event, frozen=True):
    """Something happened in a run, other than to a single request."""


class ServersStarting(RunEvent, frozen=True):
    """Servers are about to be started. From now on `replicas` returns a line for people on each."""

    replicas: Callable[[], Sequence[str]]


class StepBegan(RunEvent, frozen=True):
    """A step of the run begins, named for people; the one before it is done.

    `training` is set while the run trains. In an asynchronous run that continues while evaluations are made during it.
    """

    name: str
    training: TrainingView | None = None


class EvaluationBegan(RunEvent, frozen=True):
    """An evaluation with these stages begins. It lasts until the next step."""

    stages: Sequence[Stage[Any]]


class ResponseJudged(RunEvent, frozen=True):
    """One more response of an evaluation has been judged."""

    finished: int
    total: int


class PromptEnded(RunEvent, frozen=True):
    """A prompt's coroutine has ended: its samples are queued, or it is given up for an `error`."""

    prompt: Prompt
    outcome: PromptState  # queued, dead or unpaid
    started_s: float
    ended_s: float
    error: RequestError | BudgetSpentError | None = None


class PhaseBegan(RunEvent, frozen=True):
    pump: Pump
    iteration: int  # the first one is 1
    name: Phase
    at_s: float


class PhaseEnded(RunEvent, frozen=True):
    pump: Pump
    iteration: int  # the first one is 1
    name: Phase
    started_s: float
    ended_s: float
    ordinals: Sequence[int] = ()  # prompts of the batch, where there is one
    waits: Sequence[Wait] = ()  # in a wait for the batch: in order and without gaps


@dataclass
class PhaseTimes:
    """Seconds of one iteration, on the loop's clock."""

    wait_for_batch: float = 0.0  # the trainer waits for supervision
    train: float = 0.0
    look: float = 0.0  # a part of `train`, before the step: the trainer says what its student says
    revise: float = 0.0  # likewise: the policy decides the terms
    update_weights: float = 0.0  # the trainer waits until the weights that it may not be ahead of are served
    evaluate: float = 0.0  # the same, for an evaluation of them
    waited_for: dict[str, float] = field(default_factory=dict)  # wait_for_batch by the stage waited for


class WeightsServed(RunEvent, frozen=True):
    """All student servers hold an iteration's weights, and an evaluation that was due is made. Prompts are admitted."""

    iteration: int  # whose weights they are; the first one is 1
    version: WeightVersion
    at_s: float


class Evaluated(RunEvent, frozen=True):
    """An iteration's weights were evaluated. In a strict run this comes before the iteration is finished."""

    iteration: int
    result: EvaluationResult
    weights: WeightSnapshot
    seconds: float


class IterationFinished(RunEvent, frozen=True):
    """An iteration is trained, its weights are on disk, and the trainer need not wait for weights that are served."""

    iteration: int  # the first one is 1
    samples: Sequence[Sample]
    report: TrainReport
    times_s: PhaseTimes
    accuracy: Sequence[Mapping[str, float]] = ()  # of each prompt, as `BoundStages.accuracy` says it

    @property
    def means(self) -> dict[str, float]:
        """The mean of each metric over the samples that have it; where prompts have one, theirs over prompts."""
        return mean_metrics(each.metrics for each in self.samples) | mean_metrics(self.accuracy)


def mean_metrics(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for each in metrics:
        for name, value in each.items():
            values[name].append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


class Phases:
    """Publishes where one pump of the run is: it is in one phase at a time, from one to the next."""

    def __init__(self, pump: Pump, events: Channel) -> None:
        self._pump = pump
        self._events = events

    def begin(self, iteration: int, name: Phase) -> PhaseBegan:
        """Publish that a phase begins now."""
        began = PhaseBegan(self._pump, iteration, name, asyncio.get_running_loop().time())
        self._events.publish(began)
        return began

    def end(self, began: PhaseBegan, ordinals: Sequence[int] = (), waits: Sequence[Wait] = ()) -> float:
        """Publish that a phase ends now, and return its seconds."""
        ended_s = asyncio.get_running_loop().time()
        self._events.publish(PhaseEnded(self._pump, began.iteration, began.name, began.at_s, ended_s, ordinals, waits))
        return ended_s - began.at_s
