"""Keeps what local servers replied, so that whoever asks the same again is answered without a server.

A request has the same bits as its reply each time (`serving/test_determinism.py`), so tests of what is made of honest
replies, or of faults put on top of them, need not have them computed again. Nor need tests of runs, each of which asks
the same of its servers at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.local.server import LocalServer
from spot_async.base import wire
from spot_async.checks import diagnosis
from spot_async.checks.diagnosis import Diagnosis
from spot_async.serving import api

Kept = dict[tuple[str, ...], Any]
REPEATABLE = {api.GENERATE, api.SCORE, api.CANDIDATE_LOGPROBS}
IN_A_HURRY_S = 10.0  # such a request may be one whose deadline is to pass


async def _answered(kept: Kept, asked: tuple[str, ...], request: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
    question = *asked, wire.encode(msgspec.structs.replace(request, timeout_s=0.0)).hex()
    if question not in kept:
        kept[question] = await ask()
    await asyncio.sleep(0)  # as requests to a server do, those that are asked together overlap
    return kept[question]


class KeptReplies:
    """The replies of one server, in front of it."""

    def __init__(self, backend: LocalBackend) -> None:
        self._post = backend._server.post
        self._kept: Kept = {}

    async def post(self, path: str, request: Any, *more: Any, **named: Any) -> Any:
        """Stand in for the `post` of a `LocalServer`."""
        if path not in REPEATABLE:
            self._kept.clear()  # the weights may be others by now
        if path not in REPEATABLE or request.timeout_s < IN_A_HURRY_S:
            return await self._post(path, request, *more, **named)
        return await _answered(self._kept, (path,), request, lambda: self._post(path, request, *more, **named))


_of_starts: Kept = {}
_is_start = ContextVar("is_start", default=False)
_post = LocalServer.post


async def diagnose(*given: Any) -> Diagnosis:
    """Stand in for the `diagnose` of a run's start, before which no server has had other weights than its model's."""
    token = _is_start.set(True)
    try:
        return await diagnosis.diagnose(*given)
    finally:
        _is_start.reset(token)


async def post(server: LocalServer, path: str, request: Any, *more: Any, **named: Any) -> Any:
    """Stand in for `LocalServer.post`. What a start asks of a server that it launched is kept for other starts."""
    if not _is_start.get() or path not in REPEATABLE or server._launched is None:
        return await _post(server, path, request, *more, **named)
    asked = str(server._assignment.model), server._settings.model_dump_json(), path
    return await _answered(_of_starts, asked, request, lambda: _post(server, path, request, *more, **named))
