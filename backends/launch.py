"""Inference servers that we start ourselves, in their own Python environment.

A server's adapter turns `LaunchSettings` into a command line; here it becomes a supervised child process that
is waited for, explained by its log when it fails, and stopped with everything it started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from spot_async.config import PositiveFloat, PositiveInt, Probability, Section


class LaunchSettings(Section):
    """A server to start. It needs nothing of this package in its environment."""

    python: str = Field(description="interpreter of the environment that the server is installed in")
    port: int | None = Field(None, ge=1, le=65535, description="loopback port; default: a free one")
    devices: str | None = Field(None, description="CUDA_VISIBLE_DEVICES of the server, such as `0,1`; default: all")
    tensor_parallel_size: PositiveInt = Field(1, description="devices that share the model")
    memory_fraction: Probability | None = Field(
        None, description="share of device memory for weights and KV cache; default: the server's own"
    )
    dtype: str = Field("auto", description="type of weights and activations, as the server spells it")
    arguments: list[str] = Field([], description="further command-line arguments, as the server spells them")
    environment: dict[str, str] = Field({}, description="further environment variables")
    start_timeout_s: PositiveFloat = Field(600.0, description="longest time until it answers")


@dataclass(frozen=True)
class Command:
    """What starts a server."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


MakeCommand = Callable[[LaunchSettings, Path, int], Command]  # of the settings, the model directory and the port
IsReady = Callable[[], Awaitable[bool]]
