"""Loads adapters into our own server, and unloads them."""

from __future__ import annotations

import msgspec

from spot_async.errors import ConfigError, PermanentError
from spot_async.serving import api
from spot_async.types import WeightSnapshot

from .bodies import time_left
from .client import LocalClient

NOT_FOUND = 404


class LocalAdapters:
    """An `AdapterServer`."""

    def __init__(self, client: LocalClient, section: str) -> None:
        self._client = client
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

    async def _post(self, path: str, request: msgspec.Struct, deadline: float) -> None:
        """Send a request, but never twice."""
        await self._client.post(path, request, api.VersionReply, lambda reply: reply, deadline, resend=False)
