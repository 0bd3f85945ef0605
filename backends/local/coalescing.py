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
    """Joins requests. It keeps nothing but those that have not left yet."""

    def __init__(self) -> None:
        self._forming: dict[str, list[_Member]] = {}

    async def ask(self, send: Send, session: str, request: GenerateRequest, deadline: float) -> Generation:
        """Return the reply to one request. Raises the `RequestError` that it got.

        `send(requests, on_reply, deadline)` sends all of a session's requests, whoever asked first. It must call
        `on_reply(index, outcome)` for every request, or raise.
        """
        while True:
            forming = self._forming.get(session)
            if forming is None or len(forming) == MAX_TOGETHER:
                return await self._carry(send, session, request, deadline)
            member = _Member(request, asyncio.get_running_loop().create_future())
            forming.append(member)
            try:
                return await member.reply
            except _CarrierGone:
                continue
            except DeadlineExceededError:  # the deadline may be the carrier's, which is sooner than ours
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            finally:  # an error refers by its trace to here; with the way back it would stay in memory
                del member, forming

    async def _carry(self, send: Send, session: str, request: GenerateRequest, deadline: float) -> Generation:
        carrier = _Member(request, asyncio.get_running_loop().create_future())
        members = self._forming[session] = [carrier]
        try:
            try:
                await asyncio.sleep(0)  # all others that ask in this turn of the loop do so now
            finally:
                if self._forming.get(session) is members:
                    del self._forming[session]
            members[:] = [member for member in members if not member.reply.done()]
            try:
                await send(
                    [member.request for member in members],
                    lambda index, outcome: members[index].settle(outcome),
                    deadline,
                )
            except RequestError as error:
                _settle(members, error)
            return carrier.reply.result()
        finally:
            _settle(members[1:], _CarrierGone())
            members.clear()
            del carrier  # as in `ask`


def _settle(members: Sequence[_Member], error: Exception) -> None:
    """Give an error to all members that have no reply yet, to each one of its own."""
    for member in members:
        member.settle(copy.copy(error))
