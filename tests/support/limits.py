"""Limits of stages, for simulated runs."""

from __future__ import annotations

from typing import Any

from spot_async.config import StagesConfig
from spot_async.stages.services import STAGE_SERVERS


def same_limits(concurrency: int | None = None, **limits: Any) -> StagesConfig:
    """Return settings that give every stage these limits."""
    own = {} if concurrency is None else {name: {"concurrency": concurrency} for name in STAGE_SERVERS}
    return StagesConfig.model_validate(own | limits)
