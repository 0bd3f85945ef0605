"""Makes an SGLang server free its devices' memory for the trainer, and wakes it (`shared/sleeping.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..shared.remote import RemoteServer
from ..shared.sleeping import PARTS, Part, cannot_sleep


async def sleep(server: RemoteServer, idle: Callable[[float], Awaitable[None]], *, deadline: float) -> None:
    """Send the server to sleep once `idle` returns, which waits until no request is left.

    A server that is sent to sleep before that crashes.
    """
    await idle(deadline)
    await server.ask("/release_memory_occupation", {"tags": PARTS}, bytes, deadline=deadline)


async def wake(server: RemoteServer, part: Part, *, deadline: float) -> None:
    await server.ask("/resume_memory_occupation", {"tags": [part]}, bytes, deadline=deadline)


def check_can_sleep(server: RemoteServer, *, memory_saver: bool, weights_backup: bool) -> None:
    """Raise `ConfigError` unless the server's flags let it sleep and have its weights again afterwards."""
    if not (memory_saver and weights_backup):
        raise cannot_sleep(server, "--enable-memory-saver --enable-weights-cpu-backup")
