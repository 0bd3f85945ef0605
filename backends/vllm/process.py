"""Starts a vLLM server, and asks whether it is alive and can sleep.

Flags differ between versions, so the command depends on which one is installed. Which routes can be trusted about its
life was measured with 0.32.0: /health, /version and /v1/models answer even if the engine is frozen. /is_paused asks the
engine, but only with VLLM_SERVER_DEV_MODE. To sleep, vLLM's level 2 also forgets the weights. It is not used, because a
server that woke without new ones would sample noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.errors import ConfigError, DeadlineExceededError, PermanentError, TransientError

from ..shared.discovery import release
from ..shared.held_weights import ReadName
from ..shared.launch import Command, Doorway, installed
from ..shared.launch_settings import GIB, LaunchSettings
from ..shared.lora import LOADED_AT_ONCE
from ..shared.remote import RemoteServer
from ..shared.student_backend import cannot_sleep
from .client import NoSuchRouteError, VllmClient

PACKAGE = "vllm"
# The module to run, with what stands before the model: `vllm serve`, or the older module.
SERVE = ("vllm.entrypoints.cli.main", "serve")
API_SERVER = ("vllm.entrypoints.openai.api_server", "--model")
SCALE_OUT_SINCE = (0, 30)  # from here on /inference/v1/generate needs a flag that older versions do not know
ALLOW_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
KEPT_AT_ONCE = LOADED_AT_ONCE + 1  # in the host's memory: one is loaded before another is unloaded
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the largest ranks that a server can be started for
ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
ONE_TOKEN_SHARE = 0.7  # share of the time left for sampling one token; the rest is for a second look at the counters
TOKENS_COUNTED = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Uses:
    """What a server to start is used for."""

    max_logprobs: int  # of one token
    takes_weights: bool
    sleeps: bool = False
    weight_transfer: str | None = None  # vLLM's --weight-transfer-config
    adapters: LoraConfig | None = None


def vllm_command(settings: LaunchSettings, model: Path, doorway: Doorway, *, uses: Uses) -> Command:
    """Return the command for a server on a Unix socket, or on a port if one is given or a prefix starts it.

    A socket is safer: the server asks for its key only under `/v1` and `/inference`, and whoever reaches it may use all
    other paths. `settings.arguments` come last, so they override ours.
    """
    uds = doorway.uds if settings.port is None and not settings.is_elsewhere else None
    found = installed(settings.far_side, PACKAGE)
    # `vllm serve` does not start where the distribution is not called vllm, as that for CPUs is (0.32).
    program = SERVE if found.is_named_so else API_SERVER
    argv = [
        *(settings.python, "-m", *program, str(model)),
        *(("--host", doorway.host, "--port", str(doorway.port)) if uds is None else ("--uds", uds)),
        *("--generation-config", "vllm"),  # or sampling defaults would come from the model's directory
        *("--max-logprobs", str(uses.max_logprobs), "--dtype", settings.dtype),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        "--enable-prompt-tokens-details",  # or nothing would say how many tokens were in the prefix cache
    ]
    if settings.memory_fraction is not None:
        argv += ["--gpu-memory-utilization", str(settings.memory_fraction)]
    if settings.cache_gib is not None:  # or it would measure what is free, whoever else takes of it just then
        argv += ["--kv-cache-memory-bytes", str(int(settings.cache_gib * GIB))]
    if settings.is_narrow:
        argv += ["--hf-overrides", '{"head_dtype": "float32"}']
    if release(found.version) >= SCALE_OUT_SINCE:
        argv.append("--enable-scale-out")
    if uses.sleeps:
        argv.append("--enable-sleep-mode")
    if uses.takes_weights and "serve" in program:  # with data parallelism it has several, each with its own adapters
        argv += ["--api-server-count", "1"]
    if uses.takes_weights and uses.weight_transfer is not None:
        argv += ["--weight-transfer-config", uses.weight_transfer]
    if uses.adapters is not None:
        argv += adapter_arguments(uses.adapters)
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": doorway.key}
    if uses.takes_weights or uses.sleeps:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    if uses.adapters is not None:
        environment[ALLOW_ADAPTERS] = "True"
    return Command([*argv, *settings.arguments], {**environment, **settings.environment}, PACKAGE, uds)


def adapter_arguments(lora: LoraConfig) -> list[str]:
    """Return the flags of a server that takes such adapters.

    Without the list of layers the output layer could have one too, and then two prompts that are scored at once end the
    engine (vLLM 0.32).
    """
    rank = next((each for each in RANKS if each >= lora.rank), None)
    if rank is None:
        raise ConfigError(f"training.lora.rank={lora.rank}: vLLM takes adapters of rank {RANKS[-1]} or less")
    return [
        *("--enable-lora", "--max-lora-rank", str(rank)),
        *("--max-loras", str(LOADED_AT_ONCE), "--max-cpu-loras", str(KEPT_AT_ONCE)),
        *("--lora-target-modules", *TARGETS[lora.targets]),
    ]


async def ask_engine(client: VllmClient, names: ReadName, *, deadline: float) -> None:
    """Raise a `RequestError` unless the engine answers and has weights that we sent.

    Without developer mode this samples one token.
    """
    server = client.server
    if (paused := await is_paused(server, deadline=deadline)) is None:
        await _samples(client, deadline)
        return
    if paused:
        raise TransientError(f"{server.name}: the server is paused, but not by this run")
    with contextlib.suppress(NoSuchRouteError):
        names((await server.get("/weight_info", dict[str, Any], deadline=deadline)).get("weight_version"))


async def is_paused(server: RemoteServer, *, deadline: float) -> bool | None:
    """Return whether the server is paused; None if it does not say (without developer mode)."""
    with contextlib.suppress(NoSuchRouteError):
        return (await server.get("/is_paused", dict[str, bool], deadline=deadline)).get("is_paused", False)
    return None


async def _samples(client: VllmClient, deadline: float) -> None:
    """Raise unless a token comes, or the counters show that the engine works on other requests, which go first."""
    now = asyncio.get_running_loop().time()
    before = await _tokens_counted(client.server, deadline)
    try:
        soon = now + ONE_TOKEN_SHARE * (deadline - now)
        await client.sample([0], ONE_TOKEN, top_k=0, logprobs=0, deadline=soon)
    except DeadlineExceededError:
        if before is None or await _tokens_counted(client.server, deadline) == before:
            raise


async def _tokens_counted(server: RemoteServer, deadline: float) -> float | None:
    """Return how many tokens the engine has read and sampled since it started; None if the server does not say."""
    try:
        said = await server.endpoint.get("/metrics", deadline=deadline)
    except PermanentError:
        return None
    counts = TOKENS_COUNTED.findall(said)
    try:
        return sum(map(float, counts)) if counts else None
    except ValueError:  # the counters are not numbers
        return None


async def check_can_sleep(server: RemoteServer, *, deadline: float) -> None:
    """Raise `ConfigError` if the server has no route for sleeping.

    A server that has the route, but was started without sleep mode, shows it only when it is sent to sleep.
    """
    try:
        await confirm_sleep(server, is_sleeping=False, deadline=deadline)
    except PermanentError:
        raise cannot_sleep(server, "--enable-sleep-mode, and VLLM_SERVER_DEV_MODE=1 in its environment") from None


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


async def confirm_sleep(server: RemoteServer, *, is_sleeping: bool, deadline: float) -> None:
    """Raise `TransientError` unless the server says that it sleeps, or is awake."""
    found = await server.get("/is_sleeping", _Sleeping, deadline=deadline)
    if found.is_sleeping != is_sleeping:
        raise TransientError(
            f"{server.name}: the server was told to {'sleep, but is awake' if is_sleeping else 'wake, but sleeps'}"
        )
