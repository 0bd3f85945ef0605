"""Loads adapters into an SGLang server, and unloads them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from spot_async.errors import ConfigError, PermanentError, ServerRestartedError
from spot_async.types import WeightSnapshot

from .weights import Control

UNKNOWN = ("never been loaded", "Failed to implicitly load")


class SglangAdapters:
    """An `AdapterServer`. `ask` samples one token with an adapter of the given name."""

    def __init__(self, control: Control, section: str, ask: Callable[[str, float], Awaitable[object]]) -> None:
        self._control = control
        self._section = section
        self._ask = ask

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        try:
            await self._control.post(
                "/load_lora_adapter", {"lora_name": name, "lora_path": adapter.directory}, deadline, resend=False
            )
        except PermanentError as error:
            raise ConfigError(
                f"{self._section}: the server does not take this run's adapters: start it with --enable-lora, and with "
                f"--max-lora-rank and --lora-target-modules that fit: {error}"
            ) from None
        await self._ask(name, deadline)

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
