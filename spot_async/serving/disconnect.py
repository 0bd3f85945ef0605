"""Work for a client that may hang up: it ends when the client does, and frees what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.types import Receive

from spot_async.concurrency import first_error

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up: there is nobody left to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises `ClientGone` when the client hangs up before it is done.

    The request's body must have been read from `receive`.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_raise_when_gone(receive))
            result = await work
            watcher.cancel()
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None
    return result


async def _raise_when_gone(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
