"""Says now and then what holds a running run up.

It measures the time since it last said so, as metrics of an iteration are measured, and leaves the judgement to
`bottleneck.py`, as the report does. Requests that have not ended count for the part of that time in which they were
there, so it may be shorter than a request.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import structlog

from spot_async.base.events import Event
from spot_async.base.text import rough_time
from spot_async.errors import LONG_PAUSE_S
from spot_async.loop.events import PhaseEnded, RunEvent
from spot_async.loop.orchestrator import Orchestrator
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import ReplicaStatus
from spot_async.stages.events import Wait
from spot_async.stages.stage import Stage, StageCounters
from spot_async.telemetry.bottleneck import Bottleneck, ServerUse, judge
from spot_async.telemetry.failures import Tally, kinds_words
from spot_async.telemetry.meters import PumpClock, phase_metrics, replica_states, stage_metrics
from spot_async.telemetry.totals import run_times

DOWN = frozenset({State.OPEN, State.RECOVERING, State.DEAD})  # states in which a replica serves nothing


def replica_lines(backends: Mapping[str, object]) -> list[str]:
    """Return a line about each replica, for people."""
    return [
        f"{each.name}: {each.state}, {each.in_flight} of {each.limit} in flight"
        + (f", restarted {each.restarts} x" if each.restarts else "")
        + (f", left alone for another {rough_time(each.held_s)}" if each.held_s >= LONG_PAUSE_S else "")
        for states in replica_states(backends).values()
        for each in states
    ]


@dataclass(eq=False)
class LiveBottleneck:
    """Says every `every_s` seconds, while a run trains, what held it up since the last time.

    It begins to measure when it is made. Make it on the running loop.
    """

    orchestrator: Orchestrator
    say: Callable[[str], None]
    config: Mapping[str, Any]  # the resolved configuration
    _: KW_ONLY
    every_s: float
    cores: int | None = None  # how many the run may use
    replicas: Callable[[], Mapping[str, Sequence[ReplicaStatus]]] = dict  # returns those of each role as they are now
    _said_staleness: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._now_s = now_s = asyncio.get_running_loop().time()
        self._training = PumpClock("train", "wait for batch", now_s)
        self._waited_for: dict[str, float] = defaultdict(float)  # seconds of the trainer's, by stage
        self._publishing = PumpClock("publish", "wait for weights", now_s)
        self._counters = {stage.name: with_open(stage, now_s) for stage in self.orchestrator.stages.all}
        self._failures = Tally()
        self.orchestrator.stages.events.subscribe(self._training, self._publishing, to=RunEvent)
        self.orchestrator.stages.events.subscribe(self, to=(*Tally.hears, PhaseEnded))

    def on(self, event: Event) -> None:
        self._failures.on(event)
        if isinstance(event, PhaseEnded):
            self._add(event.waits)

    async def speak(self) -> None:
        """Run beside the run; return at once if `every_s` is 0."""
        while self.every_s:
            await asyncio.sleep(self.every_s)
            bottleneck = self.judge()
            if bottleneck.brief:
                self.say(bottleneck.brief)
                structlog.get_logger().info("bottleneck", verdict=bottleneck.sentence, advice=bottleneck.advice)
            if bottleneck.staleness and not self._said_staleness:
                self._said_staleness = True
                self.say(bottleneck.staleness)

    def judge(self) -> Bottleneck:
        """Return what held the run up since the last call."""
        row = self._take()
        failures, self._failures = self._failures, Tally()
        words = {stage: kinds_words(tally.failed) for stage, tally in failures.stages.items()}
        servers = {role: server_use(states) for role, states in self.replicas().items() if states}
        return judge(run_times([row], self.config, self.cores, words, servers))

    def _add(self, waits: Sequence[Wait]) -> None:
        """Add waits up. The part of one that was before the last look was counted then."""
        for wait in waits:
            self._waited_for[wait.stage or "nothing"] += max(0.0, wait.ended_s - max(wait.started_s, self._now_s))

    def _take(self) -> dict[str, float]:
        """Return metrics as those of an iteration, of the time since the last call."""
        now_s = asyncio.get_running_loop().time()
        if self._training.phase == "wait for batch":
            self._add(self.orchestrator.waits.between(self._training.since_s, now_s))
        waited_for, self._waited_for = self._waited_for, defaultdict(float)
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        phases = self._training.take(self._now_s)
        row = {
            "time/iteration_s": elapsed_s,
            "time/wait_for_batch_s": phases.get("wait for batch", 0.0),
            "time/train_s": phases.get("train", 0.0),
            "time/update_weights_s": phases.get("update weights", 0.0),
            **{f"wait/{stage}_s": seconds for stage, seconds in waited_for.items()},
            **phase_metrics(self._publishing.take(self._now_s)),
        }
        for stage in self.orchestrator.stages.all:
            now = with_open(stage, self._now_s)
            row |= stage_metrics(stage.name, now, self._counters[stage.name], elapsed_s)
            self._counters[stage.name] = now
        return row


def with_open(stage: Stage[Any], now_s: float) -> StageCounters:
    """Return a stage's counters, with the time that its open requests have had so far."""
    started = [now_s - each.started_s for each in stage.open if each.started_s is not None]
    waiting = [now_s - each.asked_s for each in stage.open if each.started_s is None]
    done = stage.counters
    return replace(done, busy_s=done.busy_s + sum(started), waited_s=done.waited_s + sum(waiting))


def server_use(replicas: Sequence[ReplicaStatus]) -> ServerUse:
    """Return how one role's servers are used, all together."""
    up = [each for each in replicas if each.state not in DOWN]
    held_s = [each.held_s for each in up if each.held_s > 0]
    return ServerUse(
        len(replicas), len(replicas) - len(up), sum(each.limit for each in up), len(held_s), min(held_s, default=0.0)
    )
