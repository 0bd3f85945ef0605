"""Meters that a run reads between two iterations: of its event loop, pumps, stages, replicas and traffic.

Every request, timer and reply of a run waits for the event loop. A timer that should fire every `INTERVAL_S` is
compared with the clock. While the loop is blocked, only one timer is late, however long that takes. So all the timers
that would have fired meanwhile are counted too. The metrics are thus those of an event that comes at any moment.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from spot_async.base.events import Event
from spot_async.errors import FailureClass
from spot_async.loop.events import Phase, PhaseBegan, PhaseEnded, Pump
from spot_async.protocols import Backend, TrafficSource
from spot_async.replicas.replica import ReplicaStatus
from spot_async.spending.run_spending import RunSpendingMetrics
from spot_async.stages.stage import StageCounters

INTERVAL_S = 0.05
RESOLUTION_S = 1e-5  # a shorter lag counts as none


class LoopLag:
    """Measures the running loop while inside `measuring`."""

    def __init__(self) -> None:
        self._lags_s = array("d")  # of all events, those that would have come while a timer was late too

    def take(self) -> dict[str, float]:
        """Return the metrics `loop/...` of the time since the last call."""
        lags_s, self._lags_s = self._lags_s or [0.0], array("d")
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        lowest_s = np.quantile(lags_s, [*shares.values()], method="inverted_cdf").tolist()
        return {f"loop/lag_{name}_s": lag_s for name, lag_s in zip(shares, lowest_s, strict=True)}

    def add(self, lag_s: float) -> None:
        """Note a late timer, and those that would have been due while it was late."""
        self._lags_s.extend(np.arange(lag_s, 0.0, -INTERVAL_S))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure while inside. Enter it on the loop that is to be measured."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def fire(due_s: float) -> None:
            nonlocal timer
            now_s = loop.time()
            self.add(max(now_s - due_s, RESOLUTION_S))
            timer = loop.call_at(now_s + INTERVAL_S, fire, now_s + INTERVAL_S)

        first_s = loop.time() + INTERVAL_S
        timer = loop.call_at(first_s, fire, first_s)
        try:
            yield
        finally:
            timer.cancel()


class PumpClock:
    """The seconds of one pump by phase, since they were last taken."""

    def __init__(self, pump: Pump, phase: Phase | None = None, since_s: float = float("-inf")) -> None:
        """Begin to measure: in this phase since then, or with the first phase that begins."""
        self._pump = pump
        self.phase = phase
        self.since_s = since_s  # everything before is counted
        self._seconds: dict[Phase, float] = defaultdict(float)

    def on(self, event: Event) -> None:
        match event:
            case PhaseBegan() if event.pump == self._pump:
                self.phase, self.since_s = event.name, max(self.since_s, event.at_s)
            case PhaseEnded() if event.pump == self._pump:
                self._count(event.name, max(event.started_s, self.since_s), event.ended_s)
                self.phase = None

    def take(self, now_s: float) -> Mapping[Phase, float]:
        """Return the seconds since the last call. The present phase is counted up to now."""
        if self.phase is not None:
            self._count(self.phase, self.since_s, now_s)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _count(self, phase: Phase, started_s: float, ended_s: float) -> None:
        self._seconds[phase] += max(0.0, ended_s - started_s)
        self.since_s = max(self.since_s, ended_s)


def phase_metrics(seconds: Mapping[Phase, float]) -> dict[str, float]:
    """Return the metrics `publish/...`."""
    return {f"publish/{phase.replace(' ', '_')}_s": each for phase, each in seconds.items()}


def stage_metrics(name: str, now: StageCounters, last: StageCounters, elapsed_s: float) -> dict[str, float]:
    """Return the metrics `stage/<name>/...` of the time since the last counters.

    Mean numbers of requests are the time that all requests spent together, divided by the time that passed.
    """
    metrics = {
        "requests": float(now.completed - last.completed),
        "retried": float(now.retried - last.retried),
        "failed": float(now.failed - last.failed),
        **{str(failure): float(getattr(now, failure) - getattr(last, failure)) for failure in FailureClass},
        "lost_s": now.lost_s - last.lost_s,
    }
    if ended := now.ended - last.ended:
        metrics["mean_latency_s"] = (now.busy_s - last.busy_s) / ended
    if elapsed_s > 0:
        metrics["mean_in_flight"] = (now.busy_s - last.busy_s) / elapsed_s
        metrics["mean_queued"] = (now.waited_s - last.waited_s) / elapsed_s
    return {f"stage/{name}/{metric}": value for metric, value in metrics.items()}


def replica_states(backends: Mapping[str, Any]) -> dict[str, Sequence[ReplicaStatus]]:
    """Return the replicas of those backends that are pools, by role."""
    return {role: each.replicas for role, each in backends.items() if hasattr(each, "replicas")}


def _metrics(now: ReplicaStatus, last: ReplicaStatus, elapsed_s: float) -> dict[str, float]:
    metrics: dict[str, float] = {
        "requests": now.requests - last.requests,
        "limit": now.limit,
        "limit_decreases": now.decreases - last.decreases,
        "restarts": now.restarts - last.restarts,
        "away_s": now.away_s - last.away_s,
    }
    if elapsed_s > 0:
        metrics["mean_in_flight"] = (now.busy_s - last.busy_s) / elapsed_s
    prompt_tokens = now.traffic.prompt_tokens - last.traffic.prompt_tokens
    if prompt_tokens and now.traffic.cached_tokens:  # a server that never states any may just not count them
        metrics["cached_share"] = (now.traffic.cached_tokens - last.traffic.cached_tokens) / prompt_tokens
    return metrics


@dataclass(eq=False)
class RunMeters:
    """What a run measures beside its stages: traffic and replicas of its backends, its event loop, and its spending."""

    backends: Mapping[str, Backend] = field(default_factory=dict)  # by role; they have been entered
    loop_lag: LoopLag | None = None
    spending: RunSpendingMetrics | None = None

    def __post_init__(self) -> None:
        """Begin to measure the first iteration."""
        self._traffic = {role: each for role, each in self.backends.items() if isinstance(each, TrafficSource)}
        self._last_traffic = {role: msgspec.structs.replace(each.traffic) for role, each in self._traffic.items()}
        self._last_replicas = self._replicas()
        if self.loop_lag is not None:
            self.loop_lag.take()  # drops what was measured before the first iteration

    def take(self, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of the time since the last call, `elapsed_s` ago, including evaluations."""
        return {
            **self._take_traffic(),
            **self._take_replicas(elapsed_s),
            **(self.spending.take() if self.spending is not None else {}),
            **(self.loop_lag.take() if self.loop_lag is not None else {}),
        }

    def _replicas(self) -> dict[str, ReplicaStatus]:
        return {each.name: each for states in replica_states(self.backends).values() for each in states}

    def _take_replicas(self, elapsed_s: float) -> dict[str, float]:
        now, last = self._replicas(), self._last_replicas
        self._last_replicas = now
        metrics: dict[str, float] = {}
        for name, status in now.items():
            changes = _metrics(status, last[name], elapsed_s)
            metrics |= {f"replica/{name}/{metric}": float(value) for metric, value in changes.items()}
        return metrics

    def _take_traffic(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for role, source in self._traffic.items():
            now, last = msgspec.structs.asdict(source.traffic), msgspec.structs.asdict(self._last_traffic[role])
            self._last_traffic[role] = msgspec.structs.replace(source.traffic)
            metrics |= {f"traffic/{role}/{name}": float(now[name] - last[name]) for name in now}
        return metrics
