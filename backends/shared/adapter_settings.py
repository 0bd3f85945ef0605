"""The part of a backend's settings that says whether a student's servers take adapters as weights."""

from __future__ import annotations

from typing import Self

from pydantic import PrivateAttr

from spot_async.config import LoraConfig, PluginSettings


class AdapterSettings(PluginSettings):
    """The settings of servers that can. `weights.transport` says whether they do."""

    _lora: LoraConfig | None = PrivateAttr(None)  # of the adapters that its servers take, where they take some

    def with_lora(self, lora: LoraConfig | None) -> Self:
        if not self.takes_adapters:
            return self
        if lora is None:
            raise ValueError("student.backend.weights.transport=adapter needs training.lora: otherwise, set it to disk")
        copy = self.model_copy()
        copy._lora = lora
        return copy

    def adapters(self, role: str) -> LoraConfig | None:
        """What the adapters are like that the role's servers take as their weights; None if they take none."""
        return self._lora if role == "student" else None
