"""Limits of stages, for simulated runs."""

from __future__ import annotations

from typing import Any

from spot_async.config import StagesConfig


def same_limits(**limits: Any) -> StagesConfig:
    """Return settings that give every stage these limits."""
    return StagesConfig.model_validate(dict.fromkeys(StagesConfig.model_fields, limits))
