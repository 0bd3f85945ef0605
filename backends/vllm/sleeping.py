"""Makes a vLLM server free its devices' memory for the trainer, and wakes it (`shared/sleeping.py`).

vLLM's level 2 also forgets the weights. It is not used, because a server that woke without new ones would sample noise.
"""

from __future__ import annotations

import msgspec

from spot_async.errors import PermanentError, TransientError

from ..shared.remote import RemoteServer
from ..shared.sleeping import Part, cannot_sleep


async def sleep(server: RemoteServer, *, deadline: float) -> None:
    """Send the server to sleep; return once it says that it sleeps."""
    await server.ask("/sleep?level=1", None, bytes, deadline=deadline)
    await _confirm(server, is_sleeping=True, deadline=deadline)


async def wake(server: RemoteServer, part: Part, *, deadline: float) -> None:
    """Wake a part of the server; with its cache, return once it says that it is awake."""
    await server.ask(f"/wake_up?tags={part}", None, bytes, deadline=deadline)
    if part == "kv_cache":
        await _confirm(server, is_sleeping=False, deadline=deadline)


async def check_can_sleep(server: RemoteServer, *, deadline: float) -> None:
    """Raise `ConfigError` if the server has no route for sleeping.

    A server that has the route, but was started without sleep mode, shows it only when it is sent to sleep.
    """
    try:
        await _confirm(server, is_sleeping=False, deadline=deadline)
    except PermanentError:
        raise cannot_sleep(server, "--enable-sleep-mode, and VLLM_SERVER_DEV_MODE=1 in its environment") from None


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


async def _confirm(server: RemoteServer, *, is_sleeping: bool, deadline: float) -> None:
    found = await server.get("/is_sleeping", _Sleeping, deadline=deadline)
    if found.is_sleeping != is_sleeping:
        raise TransientError(
            f"{server.name}: the server was told to {'sleep, but is awake' if is_sleeping else 'wake, but sleeps'}"
        )
