"""Ends the work for a client that hangs up, so that it frees what it holds."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from spot_async.base.tasks import while_alive

CLIENT_GONE = 499  # a status that nobody reads, except in an access log

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up: there is nobody left to answer."""


def no_reply(request: Request, error: Exception) -> Response:
    """Return the reply to a client that has hung up, while it sent its request or after."""
    return Response(status_code=CLIENT_GONE)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client hangs up first, cancel it and raise `ClientGone`.

    The request's body must have been read from `receive` already.
    """
    return await while_alive(work, lambda: _raise_when_gone(receive))


async def _raise_when_gone(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
