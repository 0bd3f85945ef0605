"""Says what each pump does, for how long it has been silent, and how long it may be. Pure arithmetic.

In a strict run one pump always waits for the other, so there is one silence: that of the train pump. In an asynchronous
run each pump has its own, or a hung publish would hide behind a trainer that goes on. A pump that waits for the other
is silent only if both are, and may be for as long as the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spot_async.loop.events import Phase, Pump
from spot_async.watchdog.progress import PUMPS, Progress
from spot_async.watchdog.silence import SilenceLimits


@dataclass(frozen=True)
class PumpLook:
    """What one pump does at one moment."""

    pump: Pump
    phase: Phase | None  # None before and after training
    iteration: int
    silence_s: float
    limit_s: float = float("inf")
    waits_for_other: bool = False

    @property
    def is_stalled(self) -> bool:
        return self.silence_s >= self.limit_s


def look_at_pumps(
    phases: Mapping[Pump, tuple[Phase, int]], progress: Progress, limits: SilenceLimits | None, now_s: float
) -> Sequence[PumpLook]:
    """Return a look at each pump that is watched, the one that is most overdue first.

    `phases` has the phase and the iteration of each pump. It is empty before and after training, and has one pump in a
    strict run.
    """
    if len(phases) < len(PUMPS):
        phase, iteration = phases.get("train", (None, 0))
        return [PumpLook("train", phase, iteration, progress.silence_s(now_s), _limit_s(limits, phase))]
    looks = []
    for pump, other in (PUMPS, PUMPS[::-1]):
        phase, iteration = phases[pump]
        silence_s, limit_s = progress.silence_s(now_s, pump), _limit_s(limits, phase)
        if waits := _waits_for_other(pump, phases):
            silence_s = min(silence_s, progress.silence_s(now_s, other))
            limit_s = max(limit_s, _limit_s(limits, phases[other][0]))
        looks.append(PumpLook(pump, phase, iteration, silence_s, limit_s, waits))
    return sorted(looks, key=lambda each: (each.waits_for_other, each.limit_s - each.silence_s, -each.silence_s))


def _waits_for_other(pump: Pump, phases: Mapping[Pump, tuple[Phase, int]]) -> bool:
    training, publishing = phases["train"][0], phases["publish"][0]
    if pump == "publish":
        return publishing == "wait for weights"
    # No request of the student is answered while its servers are drained or load weights, and perhaps no prompt is
    # admitted before new ones are written.
    held_up = training == "wait for batch" and publishing in ("write weights", "drain", "update weights")
    return held_up or training in ("update weights", "evaluate")


def _limit_s(limits: SilenceLimits | None, phase: Phase | None) -> float:
    return float("inf") if limits is None else limits.of(phase)
