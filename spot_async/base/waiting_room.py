"""The waiting room of a stage or role: who asks for something scarce waits here until it is granted, by priority.

The owner of a `WaitingRoom` says what is granted, and when. Nothing is polled.

`Turns` are for processes that share devices. They start one after another, since each looks at what is free then.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Protocol, TypeVar

Priority = tuple[int, ...]  # smaller goes first; starts with the prompt's ordinal
G = TypeVar("G")
T = TypeVar("T")


class Asker(Protocol):
    @property
    def priority(self) -> Priority: ...


A = TypeVar("A", bound=Asker)


@dataclass(eq=False)
class WaitingRoom(Generic[A, G]):
    """Nobody overtakes: an asker who cannot be granted anything yet holds up those behind, unless it `lets_pass`."""

    grant: Callable[[A], G | None]  # returns what an asker gets, or None while there is none
    # Takes what was granted to an asker who was cancelled at that moment. Like all that frees something, it calls
    # `admit`.
    give_back: Callable[[G], None]
    _: KW_ONLY
    capacity: int = sys.maxsize
    lets_pass: Callable[[A], bool] = lambda asker: False

    def __post_init__(self) -> None:
        self._arrivals = 0
        self._waiting = 0
        # A heap by priority, then by arrival. Those who were cancelled stay in it until it is their turn.
        self._queue: list[tuple[Priority, int, A, asyncio.Future[G]]] = []

    def __len__(self) -> int:
        return self._waiting

    async def enter(self, asker: A) -> G:
        """Return what the asker is granted, once it is its turn and there is some.

        Admission bounds how many wait. So OverflowError, for one more than the capacity, is a bug.
        """
        granted = None if self._queue else self.grant(asker)
        if granted is not None:
            return granted
        if self._waiting >= self.capacity:
            raise OverflowError(f"{self.capacity} requests wait already: admission let in too many")
        turn: asyncio.Future[G] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (asker.priority, self._arrivals, asker, turn))
        self._arrivals += 1
        self._waiting += 1
        try:
            self.admit()  # those who came before may be such as let others pass
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was granted as we were cancelled: pass it on
                self.give_back(turn.result())
            raise
        finally:
            self._waiting -= 1

    def admit(self) -> None:
        """Grant what there is to those who wait. Called whenever there may be more of it."""
        passed: list[tuple[Priority, int, A, asyncio.Future[G]]] = []
        while self._queue:
            entry = heapq.heappop(self._queue)
            _, _, asker, turn = entry
            if turn.done():  # cancelled
                continue
            granted = self.grant(asker)
            if granted is not None:
                turn.set_result(granted)
                continue
            passed.append(entry)
            if not self.lets_pass(asker):
                break
        for entry in passed:
            heapq.heappush(self._queue, entry)


class Turns:
    """Gives the turns in which servers and trainer start, and start again.

    The first time they come in the order of `devices`, which has the devices of each by its name. Later whoever comes
    first starts first. Who shares no device with others, or is not named, never waits.
    """

    def __init__(self, devices: Mapping[str, Set[Hashable]] | None = None) -> None:
        self._devices = dict(devices or {})
        self._started: set[str] = set()  # also those that failed to
        self._starting: set[Hashable] = set()  # devices on which something starts now
        self._ended = asyncio.Event()  # set whenever a turn ends

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait until `name` may start. Inside, nothing else starts on its devices."""
        own = self._devices.get(name, frozenset())
        while not self._may_start(name, own):
            self._ended.clear()
            await self._ended.wait()
        self._starting |= own
        try:
            yield
        finally:
            self._starting -= own
            self._started.add(name)
            self._ended.set()

    def _may_start(self, name: str, own: Set[Hashable]) -> bool:
        if not own.isdisjoint(self._starting):
            return False
        for other, devices in self._devices.items():
            if other == name:
                return True
            if other not in self._started and not own.isdisjoint(devices):
                return False
        return True


@asynccontextmanager
async def in_turn(turns: Turns, name: str, context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter a context when it is the turn of its name. It is left at any time."""
    async with AsyncExitStack() as stack:
        async with turns.turn(name):
            entered = await stack.enter_async_context(context)
        yield entered
