"""Defines how a check ends: it returns a `Finding`, or raises `Violation` or `NotOffered`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What a check that passed has seen."""

    note: str
    nats: float | None = None  # the largest difference to the exact values


class Violation(Exception):
    """Raised when the contract is broken. The message is one line for the table."""

    def __init__(self, note: str, nats: float | None = None) -> None:
        super().__init__(note)
        self.nats = nats


class NotOffered(Exception):
    """Raised when the backend's capabilities say that it does not do this."""
