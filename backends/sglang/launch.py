"""Makes the command that starts an SGLang server."""

from __future__ import annotations

from pathlib import Path

import yaml

from spot_async.config import LoraConfig
from spot_async.config.lora import TARGETS
from spot_async.errors import ConfigError
from spot_async.types import WeightVersion

from ..shared.adapters import LOADED_AT_ONCE
from ..shared.launch import Command, Doorway, LaunchSettings

PACKAGE = "sglang"
CONFIG = "--config"
FLAGS = "flags.yaml"


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
    if settings.memory_fraction is not None:
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
