"""Servers that give their devices' memory to the trainer while it trains, as vLLM and SGLang are told to.

Both keep the weights in the host's memory meanwhile and have them again when they wake, so a server is whole also
when training fails. What is not awake must be asked nothing, and vLLM's level 2, which forgets the weights, is not
used: a server that was woken without new ones would sample noise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from pydantic import Field

from spot_async.errors import ConfigError, PermanentError, TransientError

from .remote import RemoteServer, RemoteSettings


class SleepSettings(RemoteSettings):
    """Settings of a server that can sleep."""

    sleep_while_training: bool = Field(
        False,
        description="of a student on the trainer's devices: its server gives their memory back while that trains",
    )


async def sleep_vllm(server: RemoteServer, *, deadline: float) -> None:
    """Returns once the server says that it sleeps."""
    await server.ask("/sleep?level=1", None, bytes, deadline=deadline)
    await _confirm(server, is_sleeping=True, deadline=deadline)


async def wake_vllm(server: RemoteServer, *, deadline: float) -> None:
    """Returns once the server says that it is awake."""
    await server.ask("/wake_up", None, bytes, deadline=deadline)
    await _confirm(server, is_sleeping=False, deadline=deadline)


async def check_vllm(server: RemoteServer, *, deadline: float) -> None:
    """Whether a server can be told to sleep. One that was started without sleep mode shows it only when it is."""
    try:
        await _confirm(server, is_sleeping=False, deadline=deadline)
    except PermanentError:
        raise _cannot_sleep(server, "--enable-sleep-mode, and VLLM_SERVER_DEV_MODE=1 in its environment") from None


async def sleep_sglang(server: RemoteServer, idle: Callable[[float], Awaitable[None]], *, deadline: float) -> None:
    """`idle` returns once nothing is left of any request: a server that is told to sleep before ends."""
    await idle(deadline)
    await server.ask("/release_memory_occupation", {}, bytes, deadline=deadline)


async def wake_sglang(server: RemoteServer, *, deadline: float) -> None:
    await server.ask("/resume_memory_occupation", {}, bytes, deadline=deadline)


def check_sglang(server: RemoteServer, *, memory_saver: bool, weights_backup: bool) -> None:
    """Whether a server, by what it says of its flags, can sleep and has its weights again afterwards."""
    if not (memory_saver and weights_backup):
        raise _cannot_sleep(server, "--enable-memory-saver --enable-weights-cpu-backup")


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


async def _confirm(server: RemoteServer, *, is_sleeping: bool, deadline: float) -> None:
    found = await server.get("/is_sleeping", _Sleeping, deadline=deadline)
    if found.is_sleeping != is_sleeping:
        raise TransientError(
            f"{server.name}: the server {'sleeps' if found.is_sleeping else 'is awake'} against orders"
        )


def _cannot_sleep(server: RemoteServer, flags: str) -> ConfigError:
    return ConfigError(f"{server.role}.backend.sleep_while_training: the server cannot sleep: start it with {flags}")
