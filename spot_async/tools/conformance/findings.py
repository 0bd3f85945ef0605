"""What a check says: it returns a `Finding`, or raises `Violation` or `NotOffered`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What a check that held has seen."""

    note: str
    nats: float | None = None  # largest difference to what it should be


class Violation(Exception):
    """The contract is broken. The message is one line for the table."""

    def __init__(self, note: str, nats: float | None = None) -> None:
        super().__init__(note)
        self.nats = nats


class NotOffered(Exception):
    """The backend's capabilities say that it does not do this."""
