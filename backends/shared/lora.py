"""New weights as adapters beside a base model: each under a name of its own, loaded before it is asked for.

Nothing is paused, and nothing is replaced. A request names the adapter that it is for, and ends with it, so that all of
a response is of one version. An adapter is unloaded once no request names it any more, before its room is needed. Its
directory is held until then: vLLM ends when it has to read one again that is gone.

The base itself is served as an adapter of zeros, because vLLM on a CPU may mix up requests for the base with those
beside them. It stays loaded: a frozen reference of the run is asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

import structlog

from spot_async.config import LoraConfig
from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    RequestError,
    ServerRestartedError,
    VersionMismatchError,
)
from spot_async.models.adapter_files import check_adapter, layers_of, write_zero_adapter
from spot_async.models.weight_files import ADAPTER, in_use
from spot_async.types import WeightSnapshot, WeightVersion

from .held_weights import INITIAL

LOADED_AT_ONCE = 4  # the base, the newest, the one before, whose requests may not have ended yet, and the next
UNLOAD_TIMEOUT_S = 30.0


class AdapterServer(Protocol):
    """The requests that are needed here."""

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        """Load an adapter from its directory, and return once a request that names it would be answered with it."""

    async def unload(self, name: str, *, deadline: float) -> None:
        """Unload an adapter that no request names."""

    def has_lost(self, refusal: PermanentError) -> bool:
        """Return whether a request was refused because the server does not know the adapter that it names."""


class Adapter:
    """An adapter that the server has."""

    def __init__(self, name: str, version: WeightVersion, hold: contextlib.AbstractContextManager[None]) -> None:
        self.name = name
        self._version = version
        self.requests = 0  # in flight
        self.hold = contextlib.ExitStack()  # of its directory
        self.hold.enter_context(hold)

    def version(self, name: str | None = None) -> WeightVersion:
        """Return its version, whatever name a reply has for the weights: servers name those of the base there."""
        return self._version


@dataclass(eq=False)
class Adapters:
    """The adapters of one server, one update at a time. Start it first: it loads the base's own."""

    server: AdapterServer
    lora: LoraConfig
    _: KW_ONLY
    name: str
    base: Path
    directory: Path
    unloads: bool = True  # the server lives on when the run leaves it, and must not keep what the run loaded

    def __post_init__(self) -> None:
        self._zeros = self.directory / f"zero-adapter-{self.name}"
        self._layers = layers_of(self.base, self.lora)
        # Two runs at one server, or two lives of one run, never use the same names.
        self._prefix = f"spot-{secrets.token_hex(4)}"
        self._loads = 0
        self._loaded: list[Adapter] = []  # the base, then oldest first; requests name the last one
        self._leaving: list[Adapter] = []  # the server may have them, and nothing names them
        self._one_ended = asyncio.Event()
        self._updating = asyncio.Lock()

    async def start(self, *, deadline: float) -> None:
        """Load the base's adapter of zeros. Raises `ConfigError` if the server takes none like those of the run."""
        await asyncio.to_thread(write_zero_adapter, self._zeros, self.base, self.lora)
        await self.update(WeightSnapshot(directory=str(self.base.absolute()), version=INITIAL), deadline=deadline)

    async def close(self) -> None:
        """Let go of all directories. Before that, unload everything from a server that lives on, if it answers."""
        self._leaving += self._loaded
        self._loaded = []
        try:
            if self.unloads:
                await self._unload_leaving(asyncio.get_running_loop().time() + UNLOAD_TIMEOUT_S)
        finally:
            for adapter in self._leaving:
                adapter.hold.close()

    @property
    def has_any(self) -> bool:
        """Whether the server has an adapter yet."""
        return bool(self._loaded)

    @contextlib.contextmanager
    def request(self, expected: WeightVersion | None = None) -> Iterator[Adapter]:
        """Give the adapter that a request is to name, the newest or that of an expected version; one `with` a request.

        Raises `VersionMismatchError` if the server has no adapter of that version, and `ServerRestartedError` if it has
        lost the one that it was given.
        """
        newest = self._loaded[-1]
        adapter = next((each for each in self._loaded if each.version() == expected), None) if expected else newest
        if adapter is None:
            raise VersionMismatchError(
                f"{self.name}: holds weights {newest.version()}, not the {expected} asked for", may_pass=False
            )
        adapter.requests += 1
        try:
            yield adapter
        except PermanentError as error:
            if not self.server.has_lost(error):
                raise
            raise ServerRestartedError(
                f"{self.name}: the server has lost the adapter that it was given: {error}"
            ) from None
        finally:
            adapter.requests -= 1
            self._one_ended.set()

    def version_of(self, name: str) -> WeightVersion | None:
        """Return the version of an adapter that a request names now."""
        return next((each.version() for each in self._loaded if each.name == name), None)

    async def update(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Load a snapshot's adapter, and name it in all requests from now on. Requests in flight are left alone.

        Raises `DataError`, before asking the server, for files that are not whole.
        """
        is_base = Path(snapshot.directory) == self.base.absolute()
        directory = self._zeros if is_base else Path(snapshot.directory) / ADAPTER
        async with self._updating:
            await asyncio.to_thread(check_adapter, directory, self._layers, self.lora, numbers=False)
            await self._make_room(deadline)
            self._loads += 1
            adapter = Adapter(
                f"{self._prefix}-{self._loads}-{snapshot.version}", snapshot.version, in_use(Path(snapshot.directory))
            )
            self._leaving.append(adapter)  # until it is known to be there
            files = WeightSnapshot(directory=str(directory.absolute()), version=snapshot.version)
            await self.server.load(adapter.name, files, deadline=deadline)
            self._leaving.remove(adapter)
            self._loaded.append(adapter)
            self._retire()
            await self._unload_leaving(deadline)

    async def _make_room(self, deadline: float) -> None:
        """Wait until one more adapter has room. Raises `DeadlineExceededError` if requests of an old one do not end."""
        self._retire()
        try:
            async with asyncio.timeout_at(deadline):
                while len(self._loaded) >= LOADED_AT_ONCE:
                    self._one_ended.clear()
                    await self._one_ended.wait()
                    self._retire()
        except TimeoutError:
            oldest = self._loaded[1]
            raise DeadlineExceededError(
                f"{self.name}: {oldest.requests} requests of weights {oldest.version()} do not end, so there is no "
                "room for new ones"
            ) from None
        await self._unload_leaving(deadline)

    def _retire(self) -> None:
        """Let go of old adapters that no request names."""
        retired = [each for each in self._loaded[1:-1] if not each.requests]
        self._loaded = [each for each in self._loaded if each not in retired]
        self._leaving += retired

    async def _unload_leaving(self, deadline: float) -> None:
        """Unload what is leaving. What the server does not unload now is tried again after the next update."""
        for adapter in list(self._leaving):
            try:
                await self.server.unload(adapter.name, deadline=deadline)
            except RequestError as error:
                structlog.get_logger().warning("an adapter stays loaded", server=self.name, cause=str(error))
            else:
                self._leaving.remove(adapter)
                adapter.hold.close()
