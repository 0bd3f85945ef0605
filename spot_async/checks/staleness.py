"""What a run must train differently because its samples may lag behind the weights. Pure.

The reasons are in docs/methods.md, "What is measured at which version".
"""

from __future__ import annotations

from typing import Any

from spot_async.config import TrainingConfig
from spot_async.types import PolicyNeeds

IMPORTANCE_CAP = 2.0  # of runs with staleness, for policies without a teacher


def training_under_staleness(training: TrainingConfig, needs: PolicyNeeds, max_staleness: int) -> TrainingConfig:
    """Return the settings to train with: keys that the configuration does not state get the defaults of its staleness.

    A strict run keeps its settings. Otherwise `behavior` is `recomputed`. A policy without a teacher is also given an
    `importance_cap`, unless its configuration states `behavior: served`. What the configuration states always stands.
    So `served`, whose advantages push on gaps that have closed, comes only of being asked for.

    More directories of weights are kept by `max_staleness`, because by so many steps those being served may be older.
    """
    if max_staleness == 0:
        return training
    stated = training.model_fields_set
    changes: dict[str, Any] = {"keep_weights": training.keep_weights + max_staleness}
    if "behavior" not in stated:
        changes["behavior"] = "recomputed"
    is_recomputed = changes.get("behavior", training.behavior) == "recomputed"
    if is_recomputed and not needs.teacher and "importance_cap" not in stated:
        changes["importance_cap"] = IMPORTANCE_CAP
    return training.model_copy(update=changes)
