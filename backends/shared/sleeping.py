"""Servers that free their devices' memory while the trainer trains, as vLLM and SGLang can.

Both keep the weights in the host's memory and have them again when they wake, so a server is whole even if training
fails. Weights wake before the cache of keys and values, so that new ones can be sent in between. A sleeping server must
not be asked anything. The backends' `sleeping.py` send the requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, get_args

from pydantic import Field

from spot_async.errors import ConfigError

from .remote import RemoteServer, RemoteSettings

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = get_args(Part)  # in the order in which they wake


class SleepingParts:
    """The parts of one server that sleep."""

    def __init__(self) -> None:
        self._asleep: set[Part] = set()

    def sleep(self) -> None:
        """Note that all are sent to sleep."""
        self._asleep.update(PARTS)

    async def wake(self, parts: Sequence[Part], wake: Callable[[Part], Awaitable[None]]) -> None:
        """Wake those of the parts that sleep, in order."""
        for part in parts:
            if part in self._asleep:
                await wake(part)
                self._asleep.discard(part)


class SleepSettings(RemoteSettings):
    """The settings of a server that can sleep."""

    sleep_while_training: bool = Field(
        False,
        description="the student's server frees its device memory while the trainer, on the same devices, trains",
    )


def cannot_sleep(server: RemoteServer, flags: str) -> ConfigError:
    """Return the error for a server that was started without the `flags` that sleeping needs."""
    return ConfigError(f"{server.role}.backend.sleep_while_training: the server cannot sleep: start it with {flags}")
