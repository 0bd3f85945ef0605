"""The settings of servers that may serve a student: they can sleep while the trainer works, and accept new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import httpx
import pydantic
from pydantic import Field, PrivateAttr

from spot_async.config import LoraConfig, as_list

from .sleeping import SleepSettings
from .weight_transport import WeightSettings, check_reachable


class StudentServerSettings(SleepSettings):
    """The settings that the adapters for vLLM and SGLang have in common."""

    weights: WeightSettings = Field(WeightSettings(), description="how new weights reach a student's server")
    _lora: LoraConfig | None = PrivateAttr(None)  # of the adapters that its servers take, where they take some

    @pydantic.model_validator(mode="after")
    def _check_weights(self) -> Self:
        hosts = [httpx.URL(url).host for url in as_list(self.url)] + [each.host for each in as_list(self.launch)]
        check_reachable(self.weights, hosts, servers=len(self.servers()))
        return self

    def with_lora(self, lora: LoraConfig | None) -> Self:
        if self.weights.transport != "adapter":
            return self
        if lora is None:
            raise ValueError("student.backend.weights.transport=adapter needs training.lora: otherwise, set it to disk")
        copy = self.model_copy()
        copy._lora = lora
        return copy

    def adapters(self, role: str) -> LoraConfig | None:
        """What the adapters are like that the role's servers take as their weights; None if they take none."""
        return self._lora if role == "student" else None

    def reads(self, role: str, run_directory: Path) -> Path | None:
        """Return the directory that a server must see because its new weights are written there, if there is one."""
        return run_directory if role == "student" and self.weights.transport != "distributed" else None
