"""The waiting room of a stage or role: a bounded priority queue whose entries may leave early. A pure state machine."""

from __future__ import annotations

import heapq

Priority = tuple[int, ...]  # smaller goes first; starts with the prompt's ordinal


class Mailbox:
    """Tickets in order of priority, then of arrival."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heap: list[tuple[Priority, int]] = []
        self._waiting: set[int] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, priority: Priority) -> int:
        """Enter the queue and return a ticket. Admission bounds the entries, so a full mailbox is a bug."""
        if len(self._waiting) >= self._capacity:
            raise OverflowError(f"mailbox holds {self._capacity} requests already: admission let in too many")
        ticket = self._arrivals
        self._arrivals += 1
        heapq.heappush(self._heap, (priority, ticket))
        self._waiting.add(ticket)
        return ticket

    def discard(self, ticket: int) -> None:
        """Leave the queue without being served."""
        self._waiting.discard(ticket)

    def pop(self) -> int | None:
        """Return the ticket to serve next: smallest priority, then earliest arrival; None when empty."""
        while self._heap:
            _, ticket = heapq.heappop(self._heap)
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return ticket
        return None

    def put_back(self, priority: Priority, ticket: int) -> None:
        """Undo `pop` for a ticket that cannot be served yet. It keeps its place in the queue."""
        heapq.heappush(self._heap, (priority, ticket))
        self._waiting.add(ticket)
