"""Makes the command that starts a vLLM server. Flags differ between versions, so it asks which one is installed."""

from __future__ import annotations

import re
from pathlib import Path

from spot_async.config import LoraConfig
from spot_async.config.lora import TARGETS
from spot_async.errors import ConfigError

from ..shared.adapters import LOADED_AT_ONCE
from ..shared.launch import Command, Doorway, LaunchSettings, installed_version, is_installed

PACKAGE = "vllm"
GIB = 1 << 30
SCALE_OUT_SINCE = (0, 30)  # from here on /inference/v1/generate needs a flag that older versions do not know
ALLOW_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
KEPT_AT_ONCE = LOADED_AT_ONCE + 1  # in the host's memory: one is loaded before another is unloaded
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the largest ranks that a server can be started for


def vllm_command(
    settings: LaunchSettings,
    model: Path,
    doorway: Doorway,
    *,
    max_logprobs: int,
    takes_weights: bool,
    sleeps: bool = False,
    weight_transfer: str | None = None,
    adapters: LoraConfig | None = None,
) -> Command:
    """Return the command for a server on a Unix socket, or on a port if one is given or a prefix starts it.

    A socket is safer: the server asks for its key only under `/v1` and `/inference`, and whoever reaches it may use all
    other paths. `settings.arguments` come last, so they override ours.
    """
    uds = doorway.uds if settings.port is None and not settings.is_elsewhere else None
    program = _program(settings)
    argv = [
        *(settings.python, "-m", *program, str(model)),
        *(("--host", doorway.host, "--port", str(doorway.port)) if uds is None else ("--uds", uds)),
        *("--generation-config", "vllm"),  # or sampling defaults would come from the model's directory
        *("--max-logprobs", str(max_logprobs), "--dtype", settings.dtype),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        "--enable-prompt-tokens-details",  # or nothing would say how many tokens were in the prefix cache
    ]
    if settings.memory_fraction is not None:
        argv += ["--gpu-memory-utilization", str(settings.memory_fraction)]
    if settings.cache_gib is not None:  # or it would measure what is free, whoever else takes of it just then
        argv += ["--kv-cache-memory-bytes", str(int(settings.cache_gib * GIB))]
    if settings.is_narrow:
        argv += ["--hf-overrides", '{"head_dtype": "float32"}']
    if release(installed_version(settings, PACKAGE)) >= SCALE_OUT_SINCE:
        argv.append("--enable-scale-out")
    if sleeps:
        argv.append("--enable-sleep-mode")
    if takes_weights and "serve" in program:  # with data parallelism it has several, each with its own adapters
        argv += ["--api-server-count", "1"]
    if takes_weights and weight_transfer is not None:
        argv += ["--weight-transfer-config", weight_transfer]
    if adapters is not None:
        argv += adapter_arguments(adapters)
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": doorway.key}
    if takes_weights:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    if adapters is not None:
        environment[ALLOW_ADAPTERS] = "True"
    return Command([*argv, *settings.arguments], {**environment, **settings.environment}, PACKAGE, uds)


def _program(settings: LaunchSettings) -> tuple[str, ...]:
    """Return the module to run, with what stands before the model: `vllm serve`, or the older module.

    `vllm serve` does not start where the distribution is not called vllm, as that for CPUs is (0.32).
    """
    if is_installed(settings, PACKAGE):
        return "vllm.entrypoints.cli.main", "serve"
    return "vllm.entrypoints.openai.api_server", "--model"


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


def release(version: str) -> tuple[int, ...]:
    """Return major and minor version. A version without them counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (1 << 30,)
