"""Carries the wish that a run end with a checkpoint: a signal handler has it, and the loop can do so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopRequest:
    """A wish that is heard only while somebody listens."""

    def __init__(self) -> None:
        self._listener: Callable[[], None] | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` when the wish is said while inside. It must return at once."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    @property
    def is_heard(self) -> bool:
        return self._listener is not None

    def say(self) -> None:
        if self._listener is not None:
            self._listener()
