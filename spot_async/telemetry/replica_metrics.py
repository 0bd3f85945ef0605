"""Makes the metrics `replica/<name>/...`: what each replica did in an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from spot_async.replicas.replica import ReplicaStatus


@runtime_checkable
class Pool(Protocol):
    """What telemetry reads of a backend that stands for several servers."""

    @property
    def replicas(self) -> Sequence[ReplicaStatus]: ...


class ReplicaMetrics:
    """Makes the metrics of all pools among the backends of a run. The backends must have been entered."""

    def __init__(self, backends: Mapping[str, object]) -> None:
        self._pools = [each for each in backends.values() if isinstance(each, Pool)]
        self._last = self._now()

    def take(self, elapsed_s: float) -> dict[str, float]:
        """Return the metrics of the time since the last call, `elapsed_s` ago."""
        now, last = self._now(), self._last
        self._last = now
        metrics: dict[str, float] = {}
        for name, status in now.items():
            changes = _metrics(status, last[name], elapsed_s)
            metrics |= {f"replica/{name}/{metric}": float(value) for metric, value in changes.items()}
        return metrics

    def _now(self) -> dict[str, ReplicaStatus]:
        return {status.name: status for pool in self._pools for status in pool.replicas}


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
