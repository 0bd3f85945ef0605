"""Servers that free their devices' memory while the trainer trains, as vLLM and SGLang can.

Both keep the weights in the host's memory and have them again when they wake, so a server is whole even if training
fails. A sleeping server must not be asked anything. The adapters' `sleeping.py` send the requests.
"""

from __future__ import annotations

from pydantic import Field

from spot_async.errors import ConfigError

from .remote import RemoteServer, RemoteSettings


class SleepSettings(RemoteSettings):
    """The settings of a server that can sleep."""

    sleep_while_training: bool = Field(
        False,
        description="the student's server frees its device memory while the trainer, on the same devices, trains",
    )


def cannot_sleep(server: RemoteServer, flags: str) -> ConfigError:
    """Return the error for a server that was started without the `flags` that sleeping needs."""
    return ConfigError(f"{server.role}.backend.sleep_while_training: the server cannot sleep: start it with {flags}")
