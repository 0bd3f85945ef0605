"""Publishes where one pump of the run is: it is in one phase at a time, from one to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from spot_async.base.events import Channel
from spot_async.loop.events import Phase, PhaseBegan, PhaseEnded, Pump
from spot_async.stages.wait_clock import Wait


class Phases:
    """The phases of one pump."""

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
