"""Makes the command that starts an SGLang server."""

from __future__ import annotations

from pathlib import Path

import yaml

from spot_async.base.addresses import LOOPBACK
from spot_async.errors import ConfigError
from spot_async.types import WeightVersion

from ..shared.launch import Command, Doorway, LaunchSettings

PACKAGE = "sglang"
CONFIG = "--config"


def sglang_command(settings: LaunchSettings, model: Path, doorway: Doorway, *, sleeps: bool = False) -> Command:
    """Return the command for a server on loopback that names its first weights 0.0.

    `settings.arguments` come last, so they override ours.
    """
    if CONFIG in settings.arguments:
        raise ConfigError(f"launch.arguments: {CONFIG} names the file with the server's key: give what yours says here")
    argv = [
        *(settings.python, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", LOOPBACK, "--port", str(doorway.port), "--dtype", settings.dtype),
        *("--tp-size", str(settings.tensor_parallel_size), "--weight-version", str(WeightVersion(0, 0))),
        *(CONFIG, str(_key_file(doorway))),
    ]
    if settings.memory_fraction is not None:
        argv += ["--mem-fraction-static", str(settings.memory_fraction)]
    if sleeps:
        argv += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return Command([*argv, *settings.arguments], {"HF_HUB_OFFLINE": "1", **settings.environment}, PACKAGE)


def _key_file(doorway: Doorway) -> Path:
    """Write the key to a file of flags. On the command line every user of the machine could read it."""
    path = doorway.directory / "flags.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump({"api-key": doorway.key}), encoding="utf-8")
    return path
