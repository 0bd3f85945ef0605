"""Starts an SGLang server, and asks whether it is alive and can sleep.

Which routes can be trusted about its life was measured with 0.5.23. /ready, /model_info and /v1/loads answer even if
the engine is frozen. /server_info asks the engine's scheduler. /health generates a token, takes a second, and fails
while the server is paused.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from spot_async.config import LoraConfig
from spot_async.config.training import TARGETS
from spot_async.errors import ConfigError, PermanentError, ThrottledError, TransientError
from spot_async.models.model_size import read_size
from spot_async.types import WeightVersion

from ..shared.held_weights import ReadName
from ..shared.launch import Command, Doorway
from ..shared.launch_settings import GIB, LaunchSettings
from ..shared.lora import LOADED_AT_ONCE
from ..shared.remote import RemoteServer
from ..shared.student_backend import cannot_sleep
from .weights import ModelInfo, ServerInfo

PACKAGE = "sglang"
CONFIG = "--config"
FLAGS = "flags.yaml"
# SGLang takes its fraction of what is free when it starts, which is less when it is started again beside others. So
# where its cache has a size, the fraction only has to leave room for that.
MOST_OF_WHAT_IS_FREE = 0.95


def sglang_command(
    settings: LaunchSettings,
    model: Path,
    doorway: Doorway,
    *,
    sleeps: bool = False,
    adapters: LoraConfig | None = None,
) -> Command:
    """Return the command for a server that names its first weights 0.0.

    Its key is in a file of flags, because every user of the machine could read a command line. `settings.arguments`
    come last, so they override ours.
    """
    if CONFIG in settings.arguments:
        raise ConfigError(f"launch.arguments: {CONFIG} names the file with the server's key: give what yours says here")
    argv = [
        *(settings.python, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", doorway.host, "--port", str(doorway.port), "--dtype", settings.dtype),
        *("--tp-size", str(settings.tensor_parallel_size), "--weight-version", str(WeightVersion(0, 0))),
        *(CONFIG, str(doorway.directory / FLAGS)),
    ]
    if (tokens := cache_tokens(settings, model)) is not None:
        argv += ["--max-total-tokens", str(tokens), "--mem-fraction-static", str(MOST_OF_WHAT_IS_FREE)]
    elif settings.memory_fraction is not None:
        argv += ["--mem-fraction-static", str(settings.memory_fraction)]
    if settings.is_narrow:
        argv.append("--enable-fp32-lm-head")
    if sleeps:
        argv += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if adapters is not None:
        argv += ["--enable-lora", "--max-lora-rank", str(adapters.rank), "--max-loras-per-batch", str(LOADED_AT_ONCE)]
        argv += ["--lora-target-modules", *TARGETS[adapters.targets]]
    return Command(
        [*argv, *settings.arguments],
        {"HF_HUB_OFFLINE": "1", **settings.environment},
        PACKAGE,
        files={FLAGS: yaml.safe_dump({"api-key": doorway.key})},
    )


def cache_tokens(settings: LaunchSettings, model: Path) -> int | None:
    """Return how many tokens the server's cache holds; None where it is to measure that itself.

    Raises `ConfigError` for a size in GiB where it is not known what a token of the model takes.
    """
    if settings.cache_gib is None:
        return None
    if (size := read_size(model)) is None:
        raise ConfigError(
            f"launch.cache_gib={settings.cache_gib:g}: SGLang counts tokens, and what one takes is not known of "
            f"{model.name}: give memory_fraction, or --max-total-tokens in arguments"
        )
    return int(settings.cache_gib * GIB / size.cache_bytes_on(settings.tensor_parallel_size))


async def ask_engine(server: RemoteServer, names: ReadName, *, deadline: float) -> None:
    """Raise a `RequestError` unless the scheduler answers, accepts requests, and has weights that we sent."""
    await server.endpoint.get("/server_info", deadline=deadline)
    try:
        await server.endpoint.get("/ready", deadline=deadline)
    except ThrottledError:
        raise TransientError(f"{server.name}: the server is paused, but not by this run") from None
    except PermanentError:  # an older server or a router, without this path
        pass
    names((await server.get("/model_info", ModelInfo, deadline=deadline)).weight_version)


def check_can_sleep(server: RemoteServer, info: ServerInfo) -> None:
    """Raise `ConfigError` unless the server's flags let it sleep and have its weights again afterwards."""
    if not (info.enable_memory_saver and info.enable_weights_cpu_backup):
        raise cannot_sleep(server, "--enable-memory-saver --enable-weights-cpu-backup")
