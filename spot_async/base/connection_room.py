"""Listens, and has a little room for connections which have not shown yet what they want."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")

BACKLOG = 4096
STRANGERS = 16  # at a time, where few connections are expected


def listening_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, and nowhere else. Raises OSError, for example for a taken port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


class Room(Generic[T]):
    """Those who have not shown what they want, by their addresses, the oldest first. Pure.

    When it is full, the address that has the most of them loses its oldest. So a stranger who opens thousands drops
    their own, and who speaks at once gets in between.
    """

    def __init__(self, size: int = STRANGERS) -> None:
        self._size = size
        self._inside: dict[T, str] = {}

    def enter(self, key: T, address: str) -> T | None:
        """Let one in, and return who has to go for that."""
        self._inside[key] = address
        if len(self._inside) <= self._size:
            return None
        most, _ = Counter(self._inside.values()).most_common(1)[0]
        dropped = next(each for each, where in self._inside.items() if where == most)
        del self._inside[dropped]
        return dropped

    def leave(self, key: T) -> None:
        self._inside.pop(key, None)
