"""Finds out how many servers answer at one address, which may be a router's or a balancer's.

Each request has a connection of its own, since balancers choose a server for a connection or for a request. Backends
say where their server tells what only it has. Equal answers prove nothing, so a count is a least one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from spot_async.base.tasks import gather
from spot_async.errors import RequestError
from spot_async.types import BehindUrl

from .http import HttpEndpoint
from .remote import RemoteServer

CONNECTIONS = 8  # two servers behind a balancer that chooses at random look like one once in 128 times
SESSIONS = 3
SESSION_HEADER = "X-Session-ID"
OWN_CONNECTION = {"Connection": "close"}
PROCESS = "process"  # which process answers; what else is asked may differ between servers, and should not


@dataclass(frozen=True)
class Saying:
    """Where a server says something of itself."""

    path: str
    pattern: re.Pattern[bytes]  # what it says is the first group


async def ask_behind(server: RemoteServer, sayings: Mapping[str, Saying], *, deadline: float) -> BehindUrl | None:
    """Return what answered at an attached server's address; None for a server that we started."""
    if not server.settings.is_attached:
        return None
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(server.connection(OWN_CONNECTION))
        said = {
            what: await _said(plain, saying, CONNECTIONS, deadline=deadline)
            for what, saying in sayings.items()  # not at once: each adds to the load of a server at work
        }
        found = behind(said)
        if PROCESS not in found.differing:
            return found
        of_sessions = []
        for number in range(SESSIONS):
            session = OWN_CONNECTION | {SESSION_HEADER: f"spot-async-check-{number}"}
            endpoint = await stack.enter_async_context(server.connection(session))
            of_sessions.append(await _said(endpoint, sayings[PROCESS], CONNECTIONS, deadline=deadline))
        return behind(said, of_sessions)


def behind(said: Mapping[str, Sequence[str]], of_sessions: Sequence[Sequence[str]] = ()) -> BehindUrl:
    """Conclude from what was `said` over several connections, and within each of several sessions."""
    different = {what: len({*answers}) for what, answers in said.items()}
    most = max(different.values(), default=0)
    return BehindUrl(
        servers=most if different.get(PROCESS) or most > 1 else None,
        differing=tuple(what for what, count in different.items() if count > 1),
        session_header=SESSION_HEADER if of_sessions else None,
        session_keeps=all(len({*answers}) == 1 for answers in of_sessions) if of_sessions else None,
    )


async def _said(endpoint: HttpEndpoint, saying: Saying, times: int, *, deadline: float) -> list[str]:
    """Ask so many times at once; leave out what was not answered."""
    answers = await gather(_answer(endpoint, saying, deadline) for _ in range(times))
    return [answer for answer in answers if answer is not None]


async def _answer(endpoint: HttpEndpoint, saying: Saying, deadline: float) -> str | None:
    try:
        found = saying.pattern.search(await endpoint.get(saying.path, deadline=deadline))
    except RequestError:  # no such route, most often
        return None
    return found and found[1].decode(errors="replace")
