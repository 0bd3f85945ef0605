"""Joins requests of one session that are made in the same turn of the event loop into one HTTP request.

A policy asks for all probes of a prompt at once. As one HTTP request they cost little more than a single probe. Scores
of responses that came together are asked for together too, and fuller batches cost each server less. If there are more
than a server accepts, they leave as several.

Nothing here sends anything, and there is no task. Whoever asks first carries the requests of all: it sends them, and
hands out replies as they come (`Batch.settle`). If the carrier is cancelled, or its time is over, those without a reply
ask again. Equal seeds give them the same responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spot_async.errors import DeadlineExceededError, RequestError
from spot_async.serving.api import MAX_TOGETHER, EngineRequest

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Asked(Generic[T]):
    """A request, and what its reply has to be."""

    request: EngineRequest
    reply: type[T]
    check: Callable[[T], T]  # raises a `RequestError` for numbers that cannot be true
    largest: int  # bytes that the reply may have


class _CarrierGone(Exception):
    pass


class _Member:
    def __init__(self, asked: Asked[Any]) -> None:
        self.asked = asked
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: object) -> None:
        if self.reply.done():  # answered already, or cancelled
            return
        if isinstance(outcome, Exception):
            self.reply.set_exception(outcome)
        else:
            self.reply.set_result(outcome)


class Batch:
    """Requests that leave together. The first is the carrier's own."""

    def __init__(self, first: Asked[Any]) -> None:
        self._members = [_Member(first)]

    @property
    def asked(self) -> Sequence[Asked[Any]]:
        return [member.asked for member in self._members]

    @property
    def is_full(self) -> bool:
        return len(self._members) == MAX_TOGETHER

    def join(self, asked: Asked[T]) -> asyncio.Future[T]:
        self._members.append(_Member(asked))
        return self._members[-1].reply

    def settle(self, index: int, outcome: object) -> None:
        """Hand out what the request at `index` got: its reply or a `RequestError`."""
        self._members[index].settle(outcome)

    def settle_all(self, error: Exception, first: int = 0) -> None:
        """Give an error to all requests from the first on that have no reply yet, to each one of its own."""
        for member in self._members[first:]:
            member.settle(copy.copy(error))

    def leave(self) -> None:
        """Let those leave that still wait."""
        self._members = [member for member in self._members if not member.reply.done()]

    def own_reply(self) -> Any:
        """Return the carrier's reply, at the end. Raises the `RequestError` that it got."""
        own = self._members.pop(0).reply
        self._members.clear()
        try:
            return own.result()
        finally:
            del own  # an error refers by its trace to here; with the way back it would stay in memory


class Coalescer:
    """Joins requests. It keeps nothing but those that have not left yet."""

    def __init__(self) -> None:
        self._forming: dict[str, Batch] = {}

    async def reply_with_others(self, session: str, asked: Asked[T], deadline: float) -> T | None:
        """Return the reply to one request that another one carries; None if the caller has to `carry` it itself.

        Raises the `RequestError` that it got.
        """
        while (forming := self._forming.get(session)) is not None and not forming.is_full:
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
    async def carry(self, session: str, asked: Asked[Any]) -> AsyncIterator[Batch]:
        """Give the batch that the caller has to send, once all others that ask in this turn of the loop have joined.

        Every request of it must be settled, or a `RequestError` raised, which then is that of all without a reply.
        """
        batch = self._forming[session] = Batch(asked)
        try:
            try:
                await asyncio.sleep(0)
            finally:
                if self._forming.get(session) is batch:
                    del self._forming[session]
            batch.leave()
            try:
                yield batch
            except RequestError as error:
                batch.settle_all(error)
        finally:
            batch.settle_all(_CarrierGone(), first=1)
