"""The command that starts an SGLang server of ours."""

from __future__ import annotations

from pathlib import Path

from spot_async.types import WeightVersion

from .launch import Command, LaunchSettings

PACKAGE = "sglang"


def sglang_command(settings: LaunchSettings, model: Path, port: int, *, sleeps: bool = False) -> Command:
    """A server on loopback whose first weights are named 0.0; `settings.arguments` come last and so win."""
    argv = [
        *(settings.python, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", settings.dtype),
        *("--tp-size", str(settings.tensor_parallel_size), "--weight-version", str(WeightVersion(0, 0))),
    ]
    if settings.memory_fraction is not None:
        argv += ["--mem-fraction-static", str(settings.memory_fraction)]
    if sleeps:
        argv += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return Command([*argv, *settings.arguments], {"HF_HUB_OFFLINE": "1", **settings.environment}, PACKAGE)
