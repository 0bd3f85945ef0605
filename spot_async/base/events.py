"""One channel for what happens in a run. Who publishes knows no listener, and listeners do not know each other.

Each room has the types of its own events: `stages/events.py`, `loop/events.py`. What is logged for people goes to
structlog, and where that writes is said here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import structlog

from spot_async.base.secrets import SECRETS


class Event(msgspec.Struct, frozen=True):
    """Something that happened."""


class Listener(Protocol):
    """Told what happened; never asked. Must return at once: it runs between requests."""

    def on(self, event: Event) -> None: ...


class Channel:
    """Passes each event on to the listeners that want its type."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Listener, type[Event] | tuple[type[Event], ...]]] = []
        self._told: dict[type[Event], list[Listener]] = {}  # of each type that was published

    def subscribe(self, *listeners: Listener, to: type[Event] | tuple[type[Event], ...] = Event) -> None:
        """Tell these listeners of events of some types. They are called in this order, before all earlier subscribers.

        So the screen, which is there before the files are open, says nothing that is not in them yet.
        """
        self._listeners = [*((each, to) for each in listeners), *self._listeners]
        self._told = {}

    def publish(self, event: Event) -> None:
        kind = type(event)
        listeners = self._told.get(kind)
        if listeners is None:
            listeners = self._told[kind] = [each for each, wanted in self._listeners if issubclass(kind, wanted)]
        for listener in listeners:
            listener.on(event)

    def on(self, event: Event) -> None:
        """Pass on what happens on another channel, as a listener of that one."""
        self.publish(event)


@contextlib.contextmanager
def logged_by(**settings: Any) -> Iterator[None]:
    """Log by these settings of structlog while inside, and afterwards as before."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(**settings)
    try:
        yield
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


def log_events_to_python_logging() -> None:
    """Send what is logged to the Python logger of its module, unless the program has configured structlog itself.

    By default structlog prints it, which a library must not do.
    """
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
                without_secrets,
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )


def without_secrets(logger: object, method: str, line: Any) -> str:
    return SECRETS.struck_text(line)
