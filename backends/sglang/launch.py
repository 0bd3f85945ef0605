"""The command that starts an SGLang server of ours."""

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
    """A server on loopback whose first weights are named 0.0; `settings.arguments` come last and so win."""
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
    """SGLang takes its key as a flag, which every user could read, or from a file of flags."""
    path = doorway.directory / "flags.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump({"api-key": doorway.key}), encoding="utf-8")
    return path
