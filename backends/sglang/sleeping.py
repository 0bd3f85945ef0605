"""How an SGLang server gives its devices' memory to the trainer (`sleeping.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..shared.remote import RemoteServer
from ..shared.sleeping import cannot_sleep


async def sleep(server: RemoteServer, idle: Callable[[float], Awaitable[None]], *, deadline: float) -> None:
    """`idle` returns once nothing is left of any request: a server that is told to sleep before ends."""
    await idle(deadline)
    await server.ask("/release_memory_occupation", {}, bytes, deadline=deadline)


async def wake(server: RemoteServer, *, deadline: float) -> None:
    await server.ask("/resume_memory_occupation", {}, bytes, deadline=deadline)


def check_can_sleep(server: RemoteServer, *, memory_saver: bool, weights_backup: bool) -> None:
    """Whether a server, by what it says of its flags, can sleep and has its weights again afterwards."""
    if not (memory_saver and weights_backup):
        raise cannot_sleep(server, "--enable-memory-saver --enable-weights-cpu-backup")
