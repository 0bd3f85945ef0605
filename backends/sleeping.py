"""Servers that give their devices' memory to the trainer while it trains, as vLLM and SGLang are told to.

Both keep the weights in the host's memory meanwhile and have them again when they wake, so a server is whole also
when training fails. What is not awake must be asked nothing, and vLLM's level 2, which forgets the weights, is not
used: a server that was woken without new ones would sample noise.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError

from .launch import LaunchSettings
from .remote import RemoteServer, RemoteSettings


class SleepSettings(RemoteSettings):
    """Settings of a server that can sleep."""

    sleep_while_training: bool = Field(
        False,
        description="of a student's server on the trainer's devices: it gives their memory back while the trainer trains",
    )


async def sleep_vllm(server: RemoteServer, *, deadline: float) -> None:
    """Needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1. Returns once it sleeps."""
    await _ask(server, "/sleep?level=1", None, "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1", deadline)
    await _confirm_vllm(server, True, deadline)


async def wake_vllm(server: RemoteServer, *, deadline: float) -> None:
    await _ask(server, "/wake_up", None, "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1", deadline)
    await _confirm_vllm(server, False, deadline)


async def sleep_sglang(server: RemoteServer, *, deadline: float) -> None:
    """Needs --enable-memory-saver and --enable-weights-cpu-backup."""
