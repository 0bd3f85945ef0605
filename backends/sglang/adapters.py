"""Loads adapters into an SGLang server, and unloads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spot_async.errors import ConfigError, PermanentError, ServerRestartedError
from spot_async.types import WeightSnapshot

from ..shared.remote import RemoteServer
from .discovery import GENERATE
from .weights import Control

UNKNOWN = ("never been loaded", "Failed to implicitly load")


class SglangAdapters:
    """The `AdapterServer` of an SGLang server."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._control = Control(server)

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        try:
            await self._control.post(
                "/load_lora_adapter", {"lora_name": name, "lora_path": adapter.directory}, deadline, resend=False
            )
        except PermanentError as error:
            raise ConfigError(
                f"{self._server.section}: the server does not take this run's adapters: start it with --enable-lora, "
                f"and with --max-lora-rank and --lora-target-modules that fit: {error}"
            ) from None
        one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "lora_path": name}
        await self._server.ask(GENERATE, one_token, bytes, deadline=deadline)

    async def unload(self, name: str, *, deadline: float) -> None:
        with contextlib.suppress(PermanentError):  # it has none of that name
            await self._control.post("/unload_lora_adapter", {"lora_name": name}, deadline, resend=False)


@contextlib.contextmanager
def unknown_as_restarted(server: str) -> Iterator[None]:
    """Raise `ServerRestartedError` where the server does not know an adapter that it was given."""
    try:
        yield
    except PermanentError as error:
        if not any(each in str(error) for each in UNKNOWN):
            raise
        raise ServerRestartedError(f"{server}: the server has lost the adapter that it was given: {error}") from None
