"""How a vLLM server gives its devices' memory to the trainer (`sleeping.py`).

Its level 2, which forgets the weights, is not used: a server that was woken without new ones would sample noise.
"""

from __future__ import annotations

import msgspec

from spot_async.errors import PermanentError, TransientError

from ..shared.remote import RemoteServer
from ..shared.sleeping import cannot_sleep


async def sleep(server: RemoteServer, *, deadline: float) -> None:
    """Returns once the server says that it sleeps."""
    await server.ask("/sleep?level=1", None, bytes, deadline=deadline)
    await _confirm(server, is_sleeping=True, deadline=deadline)


async def wake(server: RemoteServer, *, deadline: float) -> None:
    """Returns once the server says that it is awake."""
    await server.ask("/wake_up", None, bytes, deadline=deadline)
    await _confirm(server, is_sleeping=False, deadline=deadline)


async def check_can_sleep(server: RemoteServer, *, deadline: float) -> None:
    """Whether a server can be told to sleep. One that was started without sleep mode shows it only when it is."""
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
            f"{server.name}: the server {'sleeps' if found.is_sleeping else 'is awake'} against orders"
        )
