"""Servers that give their devices' memory to the trainer while it trains, as vLLM and SGLang are told to.

Both keep the weights in the host's memory meanwhile and have them again when they wake, so a server is whole also
when training fails. What is not awake must be asked nothing. How each is told: `vllm_sleeping`, `sglang_sleeping`.
"""

from __future__ import annotations

from pydantic import Field

from spot_async.errors import ConfigError

from .remote import RemoteServer, RemoteSettings


class SleepSettings(RemoteSettings):
    """Settings of a server that can sleep."""

    sleep_while_training: bool = Field(
        False,
        description="of a student on the trainer's devices: its server gives their memory back while that trains",
    )


def cannot_sleep(server: RemoteServer, flags: str) -> ConfigError:
    """Of a server that was started without the `flags` that it would need."""
    return ConfigError(f"{server.role}.backend.sleep_while_training: the server cannot sleep: start it with {flags}")
