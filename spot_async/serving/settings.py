"""The settings of the local engine, for `LocalBackend.Settings`, the engine itself, and the server's command line.

This module does not import torch, so that a wrong setting is refused at once.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spot_async.config import PositiveInt, Section


class EngineSettings(Section):
    """How the engine uses the machine. None of these settings changes the results, except in the last bits."""

    slots: PositiveInt = Field(64, description="responses decoded together")
    max_context_tokens: PositiveInt | None = Field(
        None, description="longest prompt + response; default: the model's own limit"
    )
    threads: PositiveInt = Field(1, description="CPU threads of the engine")
    device: str = Field("cpu", description="torch device: cpu, cuda, cuda:1, ...")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of weights and activations")
    deterministic: bool | None = Field(
        None,
        description="a seed gives the same bits, whatever runs beside it; default: true where possible, which is on a "
        "CPU with one thread",
    )

    @property
    def is_deterministic(self) -> bool:
        return self._can_be_deterministic if self.deterministic is None else self.deterministic

    @property
    def _can_be_deterministic(self) -> bool:
        return self.threads == 1 and self.device == "cpu"

    def _check(self) -> None:
        if self.deterministic and not self._can_be_deterministic:
            raise ValueError(
                f"deterministic: true needs device: cpu and threads: 1, not device: {self.device} and threads: "
                f"{self.threads}: change them, or remove it"
            )


class ServeSettings(EngineSettings):
    """The settings of one server process: what it serves and where it listens."""

    model: str = Field(description="Hugging Face model directory with safetensors and tokenizer")
    uds: str | None = Field(None, description="path of the Unix socket to listen on; exclusive with port")
    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs SPOT_ASYNC_API_KEY")
    port: int | None = Field(None, ge=0, le=65535, description="TCP port to listen on")
    max_waiting: PositiveInt = Field(
        1024, description="completions under /v1 that may wait for a slot; more are refused with 503"
    )

    def _check(self) -> None:
        super()._check()
        if (self.uds is None) == (self.port is None):
            raise ValueError("give exactly one of uds and port")
