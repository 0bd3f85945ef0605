"""Loads adapters into a vLLM server, and unloads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError, ServerRestartedError
from spot_async.types import WeightSnapshot

from .client import NoSuchRouteError, VllmClient
from .launch import ALLOW_ADAPTERS

SMALLER_RANK = "greater than max_lora_rank"
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class VllmAdapters:
    """An `AdapterServer`."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        server, body = self._client.server, {"lora_name": name, "lora_path": adapter.directory}
        try:
            await server.ask("/v1/load_lora_adapter", body, bytes, deadline=deadline)
        except NoSuchRouteError:
            raise ConfigError(
                f"{server.section}: the server takes no adapters: start it with --enable-lora, and with "
                f"{ALLOW_ADAPTERS}=True in its environment"
            ) from None
        except RequestError as error:
            if SMALLER_RANK not in str(error):
                raise
            raise ConfigError(
                f"{server.section}: the server takes adapters of a smaller rank: start it with a larger "
                f"--max-lora-rank: {error}"
            ) from None
        await self._client.naming(name).sample([0], ONE_TOKEN, top_k=0, logprobs=0, deadline=deadline)
        listed = (await server.get("/v1/models", _Models, deadline=deadline)).data
        if not any(each.id == name and each.root == adapter.directory for each in listed):
            raise PoisonedReplyError(f"{server.name}/v1/models: does not list the adapter {name} that it was given")

    async def unload(self, name: str, *, deadline: float) -> None:
        try:
            await self._client.server.ask("/v1/unload_lora_adapter", {"lora_name": name}, bytes, deadline=deadline)
        except PermanentError as error:
            if error.exchange is None or error.exchange.status != 404:  # 404: it has none of that name
                raise


@contextlib.contextmanager
def unknown_as_restarted(server: str) -> Iterator[None]:
    """Raise `ServerRestartedError` where the server does not know an adapter that it was given."""
    try:
        yield
    except PermanentError as error:
        if error.exchange is None or error.exchange.status != 404:
            raise
        raise ServerRestartedError(f"{server}: the server has lost the adapter that it was given: {error}") from None
