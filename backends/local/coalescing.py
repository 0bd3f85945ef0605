"""Joins generate requests of one session that are made in the same turn of the event loop into one HTTP request.

A policy asks for all probes of a prompt at once. As one HTTP request they cost little more than a single probe. If
there are more than a server accepts, they leave as several.

Nothing here knows how the requests are sent, and there is no task. Whoever asked first is the carrier: it sends the
requests of all, and hands out replies as they come. If the carrier is cancelled, or its time is over, those without a
reply ask again. Equal seeds give them the same responses.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from spot_async.errors import DeadlineExceededError, RequestError
from spot_async.serving.api import MAX_TOGETHER, GenerateRequest
from spot_async.types import Generation

Outcome = Generation | RequestError
Send = Callable[[Sequence[GenerateRequest], Callable[[int, Outcome], None], float], Awaitable[None]]


class _CarrierGone(Exception):
    pass


@dataclass(eq=False)
class _Member:
    request: GenerateRequest
    reply: asyncio.Future[Generation]

    def settle(self, outcome: Generation | Exception) -> None:
        if self.reply.done():  # answered already, or cancelled
            return
        if isinstance(outcome, Exception):
            self.reply.set_exception(outcome)
        else:
            self.reply.set_result(outcome)


class Coalescer:
    """Joins requests and sends them by `send`.

    `send(requests, on_reply, deadline)` must call `on_reply(index, outcome)` for every request, or raise.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._forming: dict[str, list[_Member]] = {}

    async def ask(self, session: str, request: GenerateRequest, deadline: float) -> Generation:
        """Return the reply to one request. Raises the `RequestError` that it got."""
        while True:
            member = _Member(request, asyncio.get_running_loop().create_future())
            forming = self._forming.get(session)
            if forming is None or len(forming) == MAX_TOGETHER:
                return await self._carry(session, member, deadline)
            forming.append(member)
            try:
                return await member.reply
            except _CarrierGone:
                continue
            except DeadlineExceededError:  # the deadline may be the carrier's, which is sooner than ours
                if asyncio.get_running_loop().time() >= deadline:
                    raise

    async def _carry(self, session: str, carrier: _Member, deadline: float) -> Generation:
        members = self._forming[session] = [carrier]
        try:
            try:
                await asyncio.sleep(0)  # all others that ask in this turn of the loop do so now
            finally:
                if self._forming.get(session) is members:
                    del self._forming[session]
            members[:] = [member for member in members if not member.reply.done()]
            await self._send(
                [member.request for member in members],
                lambda index, outcome: members[index].settle(outcome),
                deadline,
            )
        except RequestError as error:
            for member in members:
                member.settle(copy.copy(error))
        finally:
            for member in members:
                if member is not carrier:
                    member.settle(_CarrierGone())
        return carrier.reply.result()
