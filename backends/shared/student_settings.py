"""The settings of servers that may serve a student: they can sleep while the trainer works, and accept new weights."""

from __future__ import annotations

from typing import Self

import pydantic
from pydantic import Field

from spot_async.config import as_list

from .sleeping import SleepSettings
from .weight_transport import WeightSettings, check_reachable


class StudentServerSettings(SleepSettings):
    """The settings that the adapters for vLLM and SGLang have in common."""

    weights: WeightSettings = Field(WeightSettings(), description="how new weights reach a student's server")

    @pydantic.model_validator(mode="after")
    def _check_weights(self) -> Self:
        check_reachable(self.weights, as_list(self.url), servers=len(self.servers()))
        return self
