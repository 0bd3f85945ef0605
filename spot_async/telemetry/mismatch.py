"""Warns once if trainer and student's server differ by more than rounding over weights that should be the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from spot_async.base.events import Event
from spot_async.loop.events import IterationFinished
from spot_async.models.precision import Precision
from spot_async.run_directory.layout import MISMATCHED

CAUSES = (
    "perhaps the trainer's weights are not the served ones (another directory, missing tensors, a tied head), or the "
    "server bends what it samples (penalties, biases), serves quantised weights, or is at another temperature; "
    "spot-async check asks it"
)


def mismatch_words(metrics: Mapping[str, float], precision: Precision) -> str:
    """Return what is wrong with the mismatch of one iteration (`trainer/metrics.py`); empty if rounding explains it."""
    mean = metrics.get("mismatch_mean", 0.0)
    if mean <= precision.mean_nats:
        return ""
    return (
        f"trainer and student's server give the same tokens log-probabilities that are {mean:.2g} nats apart on "
        f"average ({metrics['mismatch_max']:.2g} at most), where {precision.words} makes less than "
        f"{precision.mean_nats:g}: {CAUSES}"
    )


class MismatchWarning:
    """The listener that says so, after the first iteration for which it is true."""

    def __init__(self, precision: Precision, warn: Callable[[str], None]) -> None:
        self._precision = precision
        self._warn = warn
        self._has_spoken = False

    def on(self, event: Event) -> None:
        if not isinstance(event, IterationFinished) or self._has_spoken:
            return
        if words := mismatch_words(event.report.metrics, self._precision):
            self._has_spoken = True
            self._warn(f"iteration {event.iteration}: {words}")
            structlog.get_logger().warning(MISMATCHED, step=event.iteration, reason=words)
