"""One channel for what happens in a run. Who publishes knows no listener, and listeners do not know each other.

Each room has the types of its own events: `stages/events.py`, `loop/events.py`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Event(msgspec.Struct, frozen=True):
    """Something that happened."""


class Listener(Protocol):
    """Told what happened; never asked. Must return at once: it runs between requests."""

    def on(self, event: Event) -> None: ...


class Channel:
    """Passes each event on to all listeners."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def subscribe(self, *listeners: Listener) -> None:
        """Listeners are called in this order, before all earlier subscribers.

        So the screen, which is there before the files are open, says nothing that is not in them yet.
        """
        self._listeners = [*listeners, *self._listeners]

    def publish(self, event: Event) -> None:
        for listener in self._listeners:
            listener.on(event)

    def on(self, event: Event) -> None:
        """Pass on what happens on another channel, as a listener of that one."""
        self.publish(event)
