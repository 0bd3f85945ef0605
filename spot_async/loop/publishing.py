"""The publish pump: sends the trainer's newest weights to the student's servers while the trainer continues, and what
teachers that follow the student have from then on to theirs.

One update is under way at a time. Weights that are newer than those that wait take their place, unless an evaluation of
those is due. So a slow update never makes a queue of weights that are no longer wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import gather, sent_again
from spot_async.errors import RequestError
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.events import Evaluated, Phases, WeightsServed
from spot_async.protocols import Sleeper, WeightSink
from spot_async.stages.stages import Stages
from spot_async.types import TrainReport, WeightFile, WeightSnapshot, WeightVersion

WEIGHT_UPDATE_RETRY = RetryPolicy(attempts=3)
LAST_WAKE_TIMEOUT_S = 30.0  # after a failure, which must not wait long to be told


@dataclass(frozen=True)
class LiveEvaluation:
    """Evaluates the weights that are served. The first iteration is 1."""

    is_due: Callable[[int], bool]  # whether the weights of this iteration are to be evaluated
    measure: Callable[[int], Awaitable[EvaluationResult | None]]  # None if the budget ran out meanwhile
    # The metrics of one that was made; empty if none was due.
    figures: Callable[[int], Awaitable[Mapping[str, float]]] | None = None


@dataclass(frozen=True)
class LiveStudent:
    """The student's servers as training sees them: they take new weights, may sleep meanwhile, and are evaluated."""

    weight_sinks: Sequence[WeightSink]
    sleepers: Sequence[Sleeper] = ()  # they sleep while the trainer computes
    evaluation: LiveEvaluation | None = None
    # Servers of teachers that follow the student, by role. One that the student's own servers answer for has none.
    teacher_sinks: Mapping[str, WeightSink] = field(default_factory=dict)


class SleepingServers:
    """The student's servers that share the trainer's devices: they sleep while it trains. There may be none.

    They wake in this order: memory for weights, new weights, the rest. So the old weights and the cache of keys and
    values never lie beside what an update needs, and no request is answered by weights that are about to be replaced.
    """

    def __init__(self, sleepers: Sequence[Sleeper], timeout_s: float) -> None:
        """`timeout_s` is for one step: to sleep, or to wake a part."""
        self._sleepers = sleepers
        self._timeout_s = timeout_s
        self._are_asleep = False

    def __bool__(self) -> bool:
        return bool(self._sleepers)

    async def sleep(self) -> None:
        self._are_asleep = True
        await gather(each.sleep(deadline=self._deadline()) for each in self._sleepers)

    @asynccontextmanager
    async def updated(self) -> AsyncIterator[None]:
        """Wake what an update of weights needs. It is made inside; the rest wakes after it."""
        if self._are_asleep:
            await gather(each.wake_weights(deadline=self._deadline()) for each in self._sleepers)
        yield
        if self._are_asleep:
            await gather(each.wake(deadline=self._deadline()) for each in self._sleepers)
            self._are_asleep = False

    async def end(self) -> None:
        """Wake what still sleeps at the end of a run, since servers that are not ours outlive it.

        A server that ended needs no waking, and must not hide what failed first.
        """
        if self._are_asleep:
            deadline = asyncio.get_running_loop().time() + LAST_WAKE_TIMEOUT_S
            with contextlib.suppress(RequestError):
                await gather(each.wake(deadline=deadline) for each in self._sleepers)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s


class Publication(NamedTuple):
    """Weights that are to be served, and the iteration that made them."""

    iteration: int
    snapshot: WeightSnapshot
    teachers: Mapping[str, WeightSnapshot]  # what teachers that follow the student have then, by role
    written: asyncio.Task[tuple[WeightFile, ...]]  # done once they are all on disk


@dataclass(eq=False)
class WeightPublisher:
    """Publishes what it is offered. `confirmed` and `served` are those of the newest weights that got so far."""

    student: LiveStudent
    stages: Stages
    _: KW_ONLY
    timeout_s: float  # for one update
    drains: bool  # no request is under way at the student during one
    served: WeightVersion  # what prompts may be sampled by: servers hold it, and its evaluation is made if one was due
    changed: asyncio.Event  # set whenever other weights are confirmed or served

    def __post_init__(self) -> None:
        self.sleepers = SleepingServers(self.student.sleepers, self.timeout_s)  # they wake for an update
        self.confirmed = self.served  # all student servers hold them
        self._had: dict[str, WeightVersion] = {}  # by teachers' sinks, since they were last sent some
        self._phases = Phases("publish", self.stages.events)
        self._waiting: deque[Publication] = deque()
        self._is_complete = False
        self._offered = asyncio.Event()

    def offer(self, iteration: int, report: TrainReport, written: asyncio.Task[tuple[WeightFile, ...]]) -> None:
        """Publish an iteration's weights next, unless newer ones are offered before it comes to that."""
        evaluation = self.student.evaluation
        if self._waiting and (evaluation is None or not evaluation.is_due(self._waiting[-1].iteration)):
            self._waiting.pop()
        self._waiting.append(Publication(iteration, report.snapshot, report.teachers, written))
        self._offered.set()

    def complete(self) -> None:
        """Say that no more weights come. `run` returns once the last ones are served."""
        self._is_complete = True
        self._offered.set()

    async def run(self) -> None:
        while (publication := await self._next()) is not None:
            await self._publish(publication)

    async def _next(self) -> Publication | None:
        phase = self._phases.begin(self.served.step + 1, "wait for weights")
        while not self._waiting and not self._is_complete:
            self._offered.clear()
            await self._offered.wait()
        self._phases.end(phase)
        return self._waiting.popleft() if self._waiting else None

    async def _publish(self, publication: Publication) -> None:
        iteration, snapshot, teachers, written = publication
        loop = asyncio.get_running_loop()
        if not written.done():
            phase = self._phases.begin(iteration, "write weights")
            await asyncio.wait([written])  # if it failed, the run is about to end
            self._phases.end(phase)
        snapshot = msgspec.structs.replace(snapshot, files=written.result())
        changed = {role: each for role, each in teachers.items() if each.version != self._had.get(role)}
        sent = [
            *((sink, snapshot) for sink in self.student.weight_sinks),
            *((self.student.teacher_sinks[role], changed[role]) for role in changed),
        ]
        async with self._drained(iteration, changed):
            phase = self._phases.begin(iteration, "update weights")
            async with self.sleepers.updated():
                deadline = loop.time() + self.timeout_s
                await gather(self._update(sink, each, deadline) for sink, each in sent)
            self._phases.end(phase)
        self._had |= {role: each.version for role, each in changed.items()}
        self.confirmed = snapshot.version
        self.changed.set()
        # Before more prompts are admitted, so that nothing else is asked of a strict run's student meanwhile.
        if self.student.evaluation is not None and self.student.evaluation.is_due(iteration):
            phase = self._phases.begin(iteration, "evaluate")
            result = await self.student.evaluation.measure(iteration)
            seconds = self._phases.end(phase)
            if result is not None:
                self.stages.events.publish(Evaluated(iteration, result, snapshot, seconds))
        self.served = snapshot.version
        self.changed.set()
        self.stages.events.publish(WeightsServed(iteration, snapshot.version, loop.time()))

    @asynccontextmanager
    async def _drained(self, iteration: int, changed: Collection[str]) -> AsyncIterator[None]:
        """Let no request be under way at servers that cannot do both, nor at a teacher that changes.

        So all that a teacher says of a response is of one version. One served by the student's servers changes
        each time.
        """
        pauses = []
        for role, pause in self.stages.pauses.items():
            if self.drains if role == "student" else role in changed or role not in self.student.teacher_sinks:
                pauses.append(pause)
        if not pauses:
            yield
            return
        phase = self._phases.begin(iteration, "drain")
        async with AsyncExitStack() as stack:
            for pause in pauses:
                await stack.enter_async_context(pause.drained())
            self._phases.end(phase)
            yield

    async def _update(self, sink: WeightSink, snapshot: WeightSnapshot, deadline: float) -> None:
        """Send new weights to one sink, with retries, since a sink that failed still serves the old ones."""
        update = partial(sink.update_weights, snapshot, deadline=deadline)
        # A run has few sinks, whose attempts need no spreading.
        await sent_again(update, WEIGHT_UPDATE_RETRY, deadline, jitter=lambda: 0.0, what="weight update")
