"""Says now and then what holds a running run up.

It measures the time since it last said so, and leaves the judgement to `bottleneck.py`, as the report does. Requests
that have not ended count for the part of that time in which they were there, so it may be shorter than a request.

What staleness would bring a strict run is measured on whole iterations since the start, and said once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from spot_async.base.events import Event
from spot_async.base.text import rough_time
from spot_async.errors import LONG_PAUSE_S
from spot_async.loop.events import IterationFinished, Phase
from spot_async.loop.orchestrator import Orchestrator
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import ReplicaStatus
from spot_async.stages.services import STAGE_SERVERS
from spot_async.stages.stage import Stage
from spot_async.stages.wait_clock import WaitClock, seconds_by_stage
from spot_async.telemetry.bottleneck import Bottleneck, RunTimes, ServerUse, StageUse, judge, stage_load
from spot_async.telemetry.failures import Tally, kinds_words
from spot_async.telemetry.pump_clock import PumpClock
from spot_async.telemetry.replica_metrics import Pool
from spot_async.telemetry.staleness_gain import StageTotal, StrictTimes

DOWN = frozenset({State.OPEN, State.RECOVERING, State.DEAD})  # states in which a replica serves nothing


def replica_states(backends: Mapping[str, object]) -> dict[str, Sequence[ReplicaStatus]]:
    """Return the replicas of those backends that are pools, by role."""
    return {role: each.replicas for role, each in backends.items() if isinstance(each, Pool)}


def replica_lines(backends: Mapping[str, object]) -> list[str]:
    """Return a line about each replica, for people."""
    return [
        f"{each.name}: {each.state}, {each.in_flight} of {each.limit} in flight"
        + (f", restarted {each.restarts} x" if each.restarts else "")
        + (f", left alone for another {rough_time(each.held_s)}" if each.held_s >= LONG_PAUSE_S else "")
        for states in replica_states(backends).values()
        for each in states
    ]


class TrainerClock(PumpClock):
    """Measures what the trainer does, and which stages it waits for."""

    def __init__(self, stages: Sequence[Stage[Any]], now_s: float) -> None:
        super().__init__("train", "wait for batch", now_s)
        self._waits = WaitClock(stages)
        self._waited_for: dict[str, float] = defaultdict(float)

    def on(self, event: Event) -> None:
        self._waits.on(event)
        super().on(event)

    def take_waits(self) -> Mapping[str, float]:
        """Return the seconds of the wait for batches by stage, for the time that was taken last."""
        waited_for, self._waited_for = self._waited_for, defaultdict(float)
        return waited_for

    def _count(self, phase: Phase, started_s: float, ended_s: float) -> None:
        super()._count(phase, started_s, ended_s)
        if phase == "wait for batch" and ended_s > started_s:
            for stage, seconds in seconds_by_stage(self._waits.take(started_s, ended_s)).items():
                self._waited_for[stage] += seconds


class IterationSums:
    """Adds up the times of finished iterations, and their requests. It is a listener."""

    def __init__(self, stages: Sequence[Stage[Any]]) -> None:
        self._stages = stages
        self.times = StrictTimes(0, 0.0, 0.0, 0.0)

    def on(self, event: Event) -> None:
        match event:
            case IterationFinished(times_s=added):
                self.times = StrictTimes(
                    self.times.iterations + 1,
                    self.times.wait_s + added.wait_for_batch,
                    self.times.train_s + added.train,
                    self.times.update_s + added.update_weights,
                    {
                        stage.name: StageTotal(stage.counters.busy_s, stage.counters.completed, stage.concurrency)
                        for stage in self._stages
                        if stage.counters.completed
                    },
                )


@dataclass(frozen=True)
class StageReading:
    """A stage's totals at one moment, including those of open requests."""

    asked: int
    answered: int
    busy_s: float
    answered_busy_s: float
    queued_s: float
    sent: int
    throttled: int
    failed: int  # attempts, throttled ones left out
    lost_s: float  # by these

    @classmethod
    def of(cls, stage: Stage[Any], now_s: float) -> StageReading:
        done, open_ = stage.counters, [*stage.open]
        started = [now_s - each.started_s for each in open_ if each.started_s is not None]
        waiting = [now_s - each.asked_s for each in open_ if each.started_s is None]
        answered = done.completed + done.failed
        return cls(
            asked=answered + len(open_),
            answered=answered,
            busy_s=done.busy_s + sum(started),
            answered_busy_s=done.busy_s,
            queued_s=done.waited_s + sum(waiting),
            sent=answered + done.retried + len(started),
            throttled=done.throttled,
            failed=done.permanent + done.transient + done.poisoned,
            lost_s=done.lost_s,
        )


class LiveBottleneck:
    """Says every `every_s` seconds, while a run trains, what held it up since the last time."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        say: Callable[[str], None],
        *,
        every_s: float,
        batch_size: int,
        replicas: Callable[[], Mapping[str, Sequence[ReplicaStatus]]] = dict,
        slots: Callable[[str, int], int | None] = lambda stage, down: None,
        roles_with_room: Collection[str] = (),
        may_be_asynchronous: bool = False,
    ) -> None:
        """Begin to measure. Call it on the running loop.

        `replicas` returns those of each role as they are now. `slots(stage, down)` returns how many requests the
        stage's servers generate at once while `down` of them are down. `roles_with_room` is that of `RunTimes`. With
        `may_be_asynchronous` it says what staleness would bring.
        """
        now_s = asyncio.get_running_loop().time()
        self._orchestrator = orchestrator
        self._say = say
        self._every_s = every_s
        self._batch_size = batch_size
        self._replicas = replicas
        self._slots = slots
        self._roles_with_room = roles_with_room
        self._clock = TrainerClock(orchestrator.stages.all, now_s)
        self._publishing = PumpClock("publish", "wait for weights", now_s)
        self._sums = IterationSums(orchestrator.stages.all) if may_be_asynchronous else None
        self._said_staleness = False
        self._read_s = now_s
        self._readings = self._read(now_s)
        self._failures = Tally()
        orchestrator.stages.events.subscribe(self, self._clock, self._publishing, *([self._sums] if self._sums else []))

    def on(self, event: Event) -> None:
        self._failures.on(event)

    async def speak(self) -> None:
        """Run beside the run; return at once if `every_s` is 0."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            bottleneck = self.judge()
            if bottleneck.brief:
                self._say(bottleneck.brief)
                structlog.get_logger().info("bottleneck", verdict=bottleneck.sentence, advice=bottleneck.advice)
            if bottleneck.staleness and not self._said_staleness:
                self._said_staleness = True
                self._say(bottleneck.staleness)

    def judge(self) -> Bottleneck:
        """Return what held the run up since the last call."""
        now_s = asyncio.get_running_loop().time()
        phases, publish_s = self._clock.take(now_s), self._publishing.take(now_s)
        waited_for = self._clock.take_waits()
        before, after = self._readings, self._read(now_s)
        elapsed_s, self._read_s, self._readings = now_s - self._read_s, now_s, after
        servers = {role: server_use(states) for role, states in self._replicas().items() if states}
        uses = {
            stage.name: self._use(stage, before[stage.name], after[stage.name], waited_for, elapsed_s, servers)
            for stage in self._orchestrator.stages.all
            if waited_for.get(stage.name, 0.0) > 0
        }
        self._failures = Tally()
        return judge(
            RunTimes(
                wait_s=phases.get("wait for batch", 0.0),
                train_s=phases.get("train", 0.0),
                update_s=phases.get("update weights", 0.0),
                waited_for_s=waited_for,
                stages=uses,
                batch_size=self._batch_size,
                servers=servers,
                roles_with_room=self._roles_with_room,
                publish_s={} if self._orchestrator.is_strict else publish_s,
                strict=self._sums.times if self._sums is not None else None,
            )
        )

    def _use(
        self,
        stage: Stage[Any],
        before: StageReading,
        after: StageReading,
        waited_for: Mapping[str, float],
        elapsed_s: float,
        servers: Mapping[str, ServerUse],
    ) -> StageUse:
        server = servers.get(STAGE_SERVERS[stage.name])
        limit = stage.concurrency if server is None else min(stage.concurrency, max(1, server.let_in))
        over_s = waited_for[stage.name] if self._orchestrator.is_strict else elapsed_s
        in_flight, queued = stage_load(after.busy_s - before.busy_s, after.queued_s - before.queued_s, over_s, limit)
        answered, sent = after.answered - before.answered, after.sent - before.sent
        busy_s, lost_s = after.busy_s - before.busy_s, after.lost_s - before.lost_s
        failed = after.failed - before.failed
        tally = self._failures.stages.get(stage.name)
        return StageUse(
            in_flight,
            queued,
            limit,
            self._slots(stage.name, 0 if server is None else server.down),
            asked_per_s=(after.asked - before.asked) / elapsed_s,
            latency_s=(after.answered_busy_s - before.answered_busy_s) / answered if answered else None,
            throttled_share=min(1.0, (after.throttled - before.throttled) / sent) if sent > 0 else 0.0,
            is_limit_of_servers=limit < stage.concurrency,
            failed_share=min(1.0, failed / sent) if sent > 0 else 0.0,
            lost_share=min(1.0, lost_s / busy_s) if busy_s > 0 else 0.0,
            failures=kinds_words(tally.failed) if tally is not None else "",
        )

    def _read(self, now_s: float) -> dict[str, StageReading]:
        return {stage.name: StageReading.of(stage, now_s) for stage in self._orchestrator.stages.all}


def server_use(replicas: Sequence[ReplicaStatus]) -> ServerUse:
    """Return how one role's servers are used, all together."""
    up = [each for each in replicas if each.state not in DOWN]
    held_s = [each.held_s for each in up if each.held_s > 0]
    return ServerUse(
        len(replicas), len(replicas) - len(up), sum(each.limit for each in up), len(held_s), min(held_s, default=0.0)
    )
