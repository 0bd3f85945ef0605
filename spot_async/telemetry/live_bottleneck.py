"""Says now and then what holds a running run up.

It measures the time since it last said so, and leaves the judgement to `bottleneck.py`, as the report does. Requests
that have not ended count for the part of that time in which they were there, so it may be shorter than a request.
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
from spot_async.loop.events import Phase, PhaseBegan, PhaseEnded
from spot_async.loop.orchestrator import Orchestrator
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import ReplicaStatus
from spot_async.stages.stage import Stage
from spot_async.stages.stages import STAGE_SERVERS
from spot_async.stages.wait_clock import WaitClock, seconds_by_stage
from spot_async.telemetry.bottleneck import Bottleneck, RunTimes, ServerUse, StageUse, judge, stage_load
from spot_async.telemetry.replica_metrics import Pool

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


class TrainerClock:
    """Measures what the trainer does and what it waits for, including the phase that goes on. It is a listener."""

    def __init__(self, stages: Sequence[Stage[Any]], now_s: float) -> None:
        self._waits = WaitClock(stages)
        self._since_s = now_s  # everything before is counted
        self._phase: Phase = "wait for batch"  # the one that goes on
        self._phases: dict[Phase, float] = defaultdict(float)
        self._waited_for: dict[str, float] = defaultdict(float)

    def on(self, event: Event) -> None:
        match event:
            case PhaseBegan(pump="train"):
                self._phase = event.name
            case PhaseEnded(pump="train"):
                self._count(event.name, max(event.started_s, self._since_s), event.ended_s)
            case _:
                self._waits.on(event)

    def take(self, now_s: float) -> tuple[Mapping[Phase, float], Mapping[str, float]]:
        """Return the seconds since the last call: by phase, and those of the wait by stage."""
        self._count(self._phase, self._since_s, now_s)
        phases, waited_for = self._phases, self._waited_for
        self._phases, self._waited_for, self._since_s = defaultdict(float), defaultdict(float), now_s
        return phases, waited_for

    def _count(self, phase: Phase, started_s: float, ended_s: float) -> None:
        if ended_s <= started_s:  # `take` has counted it already
            return
        self._phases[phase] += ended_s - started_s
        if phase == "wait for batch":
            for stage, seconds in seconds_by_stage(self._waits.take(started_s, ended_s)).items():
                self._waited_for[stage] += seconds
        self._since_s = ended_s


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
    ) -> None:
        """Begin to measure. Call it on the running loop.

        `replicas` returns those of each role as they are now. `slots(stage, down)` returns how many requests the
        stage's servers generate at once while `down` of them are down. `roles_with_room` is that of `RunTimes`.
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
        self._read_s = now_s
        self._readings = self._read(now_s)
        orchestrator.stages.events.subscribe(self._clock)

    async def speak(self) -> None:
        """Run beside the run; return at once if `every_s` is 0."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            bottleneck = self.judge()
            if bottleneck.brief:
                self._say(bottleneck.brief)
                structlog.get_logger().info("bottleneck", verdict=bottleneck.sentence, advice=bottleneck.advice)

    def judge(self) -> Bottleneck:
        """Return what held the run up since the last call."""
        now_s = asyncio.get_running_loop().time()
        phases, waited_for = self._clock.take(now_s)
        before, after = self._readings, self._read(now_s)
        elapsed_s, self._read_s, self._readings = now_s - self._read_s, now_s, after
        servers = {role: server_use(states) for role, states in self._replicas().items() if states}
        uses = {
            stage.name: self._use(stage, before[stage.name], after[stage.name], waited_for, elapsed_s, servers)
            for stage in self._orchestrator.stages.all
            if waited_for.get(stage.name, 0.0) > 0
        }
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
        in_flight, queued = stage_load(
            after.busy_s - before.busy_s, after.queued_s - before.queued_s, waited_for[stage.name], limit
        )
        answered, sent = after.answered - before.answered, after.sent - before.sent
        return StageUse(
            in_flight,
            queued,
            limit,
            self._slots(stage.name, 0 if server is None else server.down),
            asked_per_s=(after.asked - before.asked) / elapsed_s,
            latency_s=(after.answered_busy_s - before.answered_busy_s) / answered if answered else None,
            throttled_share=min(1.0, (after.throttled - before.throttled) / sent) if sent > 0 else 0.0,
            is_limit_of_servers=limit < stage.concurrency,
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
