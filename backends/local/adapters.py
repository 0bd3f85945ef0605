"""Loads adapters into our own server, and unloads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from spot_async.errors import ConfigError, PermanentError
from spot_async.serving import api
from spot_async.types import WeightSnapshot

from .bodies import time_left

NOT_FOUND = 404

Post = Callable[[str, msgspec.Struct, float], Awaitable[object]]  # a path, a request and its deadline


class LocalAdapters:
    """An `AdapterServer`. `post` sends a request once."""

    def __init__(self, post: Post, section: str) -> None:
        self._post = post
        self._section = section

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        request = api.LoadRequest(name=name, snapshot=adapter, timeout_s=time_left(deadline))
        try:
            await self._post(api.LOAD_ADAPTER, request, deadline)
        except PermanentError as error:
            if error.exchange is None or error.exchange.status != NOT_FOUND:
                raise
            raise ConfigError(
                f"{self._section}: the server takes no adapters: start it with this version of spot-async"
            ) from None

    async def unload(self, name: str, *, deadline: float) -> None:
        await self._post(api.UNLOAD_ADAPTER, api.UnloadRequest(name=name, timeout_s=time_left(deadline)), deadline)
