"""The waiting room of a stage or role: who asks for something scarce waits here until it is granted, by priority.

`Mailbox` says who is next, as a pure state machine. `WaitingRoom` is the asyncio shell around it. Its owner says what
is granted, and when. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Priority = tuple[int, ...]  # smaller goes first; starts with the prompt's ordinal


class Mailbox:
    """Tickets in order of priority, then of arrival. They may leave early."""

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


class Asker(Protocol):
    @property
    def priority(self) -> Priority: ...


A = TypeVar("A", bound=Asker)
G = TypeVar("G")


class WaitingRoom(Generic[A, G]):
    """Nobody overtakes: an asker who cannot be granted anything yet holds up those behind, unless it `lets_pass`."""

    def __init__(
        self,
        grant: Callable[[A], G | None],
        give_back: Callable[[G], None],
        *,
        capacity: int = sys.maxsize,
        lets_pass: Callable[[A], bool] = lambda asker: False,
    ) -> None:
        """`grant` returns what an asker gets, or None while there is none.

        `give_back` takes what was granted to an asker who was cancelled at that moment. Like all that frees something,
        it calls `admit`.
        """
        self._grant = grant
        self._give_back = give_back
        self._lets_pass = lets_pass
        self._mailbox = Mailbox(capacity)
        self._turns: dict[int, tuple[A, asyncio.Future[G]]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    async def enter(self, asker: A) -> G:
        """Return what the asker is granted, once it is its turn and there is some."""
        granted = None if self._mailbox else self._grant(asker)
        if granted is not None:
            return granted
        ticket = self._mailbox.add(asker.priority)
        turn: asyncio.Future[G] = asyncio.get_running_loop().create_future()
        self._turns[ticket] = asker, turn
        try:
            self.admit()  # those who came before may be such as let others pass
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was granted as we were cancelled: pass it on
                self._give_back(turn.result())
            raise
        finally:
            self._mailbox.discard(ticket)
            del self._turns[ticket]

    def admit(self) -> None:
        """Grant what there is to those who wait. Called whenever there may be more of it."""
        passed: list[tuple[A, int]] = []
        while (ticket := self._mailbox.pop()) is not None:
            asker, turn = self._turns[ticket]
            if turn.done():  # cancelled, and had no time yet to leave
                continue
            granted = self._grant(asker)
            if granted is not None:
                turn.set_result(granted)
                continue
            passed.append((asker, ticket))
            if not self._lets_pass(asker):
                break
        for asker, ticket in passed:
            self._mailbox.put_back(asker.priority, ticket)
