"""Makes the command that starts an SGLang server."""

from __future__ import annotations

from pathlib import Path

import yaml

from spot_async.config import LoraConfig
from spot_async.config.lora import TARGETS
from spot_async.errors import ConfigError
from spot_async.models.model_size import read_size
from spot_async.types import WeightVersion

from ..shared.adapters import LOADED_AT_ONCE
from ..shared.launch import Command, Doorway, LaunchSettings

PACKAGE = "sglang"
CONFIG = "--config"
FLAGS = "flags.yaml"
GIB = 1 << 30
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

    Raises `ConfigError` for a size in GiB where nobody knows what a token of the model takes.
    """
    if settings.cache_gib is None:
        return None
    if (size := read_size(model)) is None:
        raise ConfigError(
            f"launch.cache_gib={settings.cache_gib:g}: SGLang counts tokens, and what one takes is not known of "
            f"{model.name}: give memory_fraction, or --max-total-tokens in arguments"
        )
    return int(settings.cache_gib * GIB / size.cache_bytes_on(settings.tensor_parallel_size))
