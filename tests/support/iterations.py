"""Iterations as the listeners of a run are told of them."""

from __future__ import annotations

from collections.abc import Sequence

from spot_async.loop.events import IterationFinished, PhaseTimes
from spot_async.types import Sample, TrainReport, WeightSnapshot, WeightVersion


def finished_iteration(
    iteration: int, samples: Sequence[Sample] = (), *, performance: dict[str, float] | None = None, **metrics: float
) -> IterationFinished:
    """Return one whose trainer reported these metrics."""
    snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, iteration))
    report = TrainReport(snapshot=snapshot, metrics=metrics, performance=performance or {})
    return IterationFinished(iteration, [*samples], report, PhaseTimes())
