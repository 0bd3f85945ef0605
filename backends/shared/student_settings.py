"""The settings of servers that may serve a student: they can sleep while the trainer works, and accept new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import httpx
import pydantic
from pydantic import Field

from spot_async.config import as_list

from .adapter_settings import AdapterSettings
from .sleeping import SleepSettings
from .weight_transport import WeightSettings, check_reachable


class StudentServerSettings(AdapterSettings, SleepSettings):
    """The settings that the adapters for vLLM and SGLang have in common."""

    weights: WeightSettings = Field(WeightSettings(), description="how new weights reach a student's server")

    @pydantic.model_validator(mode="after")
    def _check_weights(self) -> Self:
        hosts = [httpx.URL(url).host for url in as_list(self.url)] + [each.host for each in as_list(self.launch)]
        check_reachable(self.weights, hosts, servers=len(self.servers()))
        return self

    @property
    def takes_adapters(self) -> bool:
        return self.weights.transport == "adapter"

    def reads(self, role: str, run_directory: Path) -> Path | None:
        """Return the directory that a server must see because its new weights are written there, if there is one."""
        return run_directory if role == "student" and self.weights.transport != "distributed" else None
