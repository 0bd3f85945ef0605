"""Loads LoRA adapters into a vLLM server, and unloads them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import structlog

from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError
from spot_async.types import WeightSnapshot

from ..shared.discovery import ModelList
from ..shared.lora import LOADED_AT_ONCE
from .client import NoSuchRouteError, VllmClient
from .process import ALLOW_ADAPTERS, KEPT_AT_ONCE, ONE_TOKEN
from .weights import DEVELOPER_MODE

SMALLER_RANK = "greater than max_lora_rank"


class _Flags(msgspec.Struct):
    """vLLM's own settings of adapters."""

    max_loras: int
    max_cpu_loras: int | None = None  # None: as many
    target_modules: list[str] | None = None  # None: all layers


class _Config(msgspec.Struct):
    lora_config: _Flags | None = None


class _About(msgspec.Struct):
    vllm_config: _Config | str | None = None  # text before the format could be asked for


# Layers that vLLM makes one of. Its list may name either.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


async def check_flags(client: VllmClient, lora: LoraConfig, *, deadline: float) -> None:
    """Raise ConfigError if a server of yours leaves out layers of the run's adapters, or holds too few at once.

    vLLM loads such adapters with a 200 and leaves those layers as they are. Only in developer mode does it say what it
    was started with.
    """
    server = client.server
    try:
        about = await server.get("/server_info?config_format=json", _About, deadline=deadline)
    except NoSuchRouteError:
        about = _About()
    flags = about.vllm_config.lora_config if isinstance(about.vllm_config, _Config) else None
    if flags is None:  # one that takes no adapters is refused when it is given the first
        structlog.get_logger().warning(
            "does not say which layers of an adapter it uses", server=server.name, needs=DEVELOPER_MODE
        )
        return
    used = flags.target_modules
    left_out = [] if used is None else [each for each in TARGETS[lora.targets] if not {each, FUSED.get(each)} & {*used}]
    if left_out:
        raise ConfigError(
            f"{server.section}: the server leaves the adapters of {', '.join(left_out)} out: add them to its "
            "--lora-target-modules and restart it"
        )
    kept = flags.max_cpu_loras or flags.max_loras
    if flags.max_loras < LOADED_AT_ONCE or kept < KEPT_AT_ONCE:
        raise ConfigError(
            f"{server.section}: the server uses {flags.max_loras} adapters at once and keeps {kept}: restart it with "
            f"--max-loras {LOADED_AT_ONCE} --max-cpu-loras {KEPT_AT_ONCE}"
        )


class VllmLora:
    """The `AdapterServer` of a vLLM server."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        server, body = self._client.server, {"lora_name": name, "lora_path": adapter.directory}
        try:
            await server.ask("/v1/load_lora_adapter", body, bytes, deadline=deadline, resend=False)
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
        # A server that takes an adapter wrongly answers 200, or ends at its first token.
        await replace(self._client, model=name).sample([0], ONE_TOKEN, top_k=0, logprobs=0, deadline=deadline)
        listed = (await server.get("/v1/models", ModelList, deadline=deadline)).data
        if not any(each.id == name and each.root == adapter.directory for each in listed):
            raise PoisonedReplyError(f"{server.name}/v1/models: does not list the adapter {name} that it was given")

    async def unload(self, name: str, *, deadline: float) -> None:
        try:
            await self._client.server.ask("/v1/unload_lora_adapter", {"lora_name": name}, bytes, deadline=deadline)
        except PermanentError as error:
            if not self.has_lost(error):
                raise

    def has_lost(self, refusal: PermanentError) -> bool:
        return refusal.exchange is not None and refusal.exchange.status == 404
