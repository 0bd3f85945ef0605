"""Joins requests of one group that are made in the same turn of the event loop into one HTTP request.

A policy asks for all probes of a prompt at once. As one HTTP request they cost little more than a single probe. Scores
of responses that came together are asked for together too, and fuller batches cost each server less. More than
`MAX_TOGETHER` leave as several HTTP requests.

Nothing here sends anything, and there is no task. Whoever asks first carries the requests of all: it sends them, and
hands out replies as they come (`Batch.settle`). If the carrier is cancelled, or its time is over, those without a reply
ask again. Equal seeds give them the same responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any, Generic, TypeVar

from spot_async.errors import DeadlineExceededError, RequestError
from spot_async.serving.api import MAX_TOGETHER, EngineRequest

S = TypeVar("S")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Asked(Generic[T]):
    """A request, and what its reply has to be."""

    request: EngineRequest
    kind: type[T]
    check: Callable[[T], T]  # raises a `RequestError` for numbers that cannot be true
    largest: int  # bytes that the reply may have


class _CarrierGone(Exception):
    pass


class RefusedTogetherError(RequestError):
    """Requests were refused as one. Each has to be asked alone, since it may not be the reason."""


class Batch(Generic[T]):
    """Requests that leave together. The first is the carrier's own."""

    def __init__(self, first: Asked[T]) -> None:
        self.asked: list[Asked[Any]] = []
        self._replies: list[asyncio.Future[Any]] = []
        self.join(first)

    def join(self, asked: Asked[S]) -> asyncio.Future[S]:
        self.asked.append(asked)
        self._replies.append(asyncio.get_running_loop().create_future())
        return self._replies[-1]

    def settle(self, index: int, outcome: object) -> None:
        """Hand out what the request at `index` got: its reply or a `RequestError`."""
        reply = self._replies[index]
        if reply.done():  # answered already, or cancelled
            return
        if isinstance(outcome, Exception):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)

    def settle_all(self, error: Exception, first: int = 0) -> None:
        """Give an error to all requests from the first on that have no reply yet, to each one of its own."""
        for index in range(first, len(self._replies)):
            self.settle(index, copy.copy(error))

    def leave(self) -> None:
        """Let those leave that still wait."""
        waiting = [not reply.done() for reply in self._replies]
        self.asked, self._replies = list(compress(self.asked, waiting)), list(compress(self._replies, waiting))

    def own_reply(self) -> T:
        """Return the carrier's reply, at the end. Raises the `RequestError` that it got."""
        own: asyncio.Future[T] = self._replies.pop(0)
        self._replies.clear()
        try:
            return own.result()
        finally:
            del own  # an error refers by its trace to here; with the way back it would stay in memory


class Coalescer:
    """Joins requests. It keeps nothing but those that have not left yet."""

    def __init__(self) -> None:
        self._forming: dict[str, Batch[Any]] = {}

    async def reply_with_others(self, group: str, asked: Asked[T], deadline: float) -> T | None:
        """Return the reply to one request that another one carries; None if the caller has to `carry` it itself.

        Raises the `RequestError` that it got.
        """
        while (forming := self._forming.get(group)) is not None and len(forming.asked) < MAX_TOGETHER:
            reply = forming.join(asked)
            try:
                return await reply
            except _CarrierGone:
                continue
            except DeadlineExceededError:  # the deadline may be the carrier's, which is sooner than ours
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            finally:
                del reply, forming  # as in `own_reply`
        return None

    @contextlib.asynccontextmanager
    async def carry(self, group: str, asked: Asked[T]) -> AsyncIterator[Batch[T]]:
        """Give the batch that the caller has to send, once all others that ask in this turn of the loop have joined.

        Every request of it must be settled, or a `RequestError` raised, which then is that of all without a reply.
        """
        batch = self._forming[group] = Batch(asked)
        try:
            try:
                await asyncio.sleep(0)
            finally:
                if self._forming.get(group) is batch:
                    del self._forming[group]
            batch.leave()
            try:
                yield batch
            except RequestError as error:
                # From Python 3.12 on its trace leads to `__aexit__`, which refers to it: it would stay in memory.
                batch.settle_all(error.with_traceback(None))
        finally:
            batch.settle_all(_CarrierGone(), first=1)
