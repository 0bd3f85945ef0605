"""What a run must train differently because its samples may lag behind the weights. Pure.

The reasons are in docs/methods.md, "What is measured at which version".
"""

from __future__ import annotations

from typing import Any

from spot_async.config import TrainingConfig

IMPORTANCE_CAP = 2.0  # of runs with staleness


def training_under_staleness(training: TrainingConfig, max_staleness: int) -> TrainingConfig:
    """Return the settings to train with, without defaults that follow from others.

    `behavior` is what its default means. With staleness there is also an `importance_cap`, unless the configuration
    states one or `behavior: served`. Recomputed advantages alone would be weighed as older weights sampled the tokens.

    More directories of weights are kept by `max_staleness`, because by so many steps those being served may be older.
    """
    behavior = training.behavior_under(max_staleness)
    changes: dict[str, Any] = {"behavior": behavior, "keep_weights": training.keep_weights + max_staleness}
    if max_staleness and behavior == "recomputed" and training.importance_cap is None:
        changes["importance_cap"] = IMPORTANCE_CAP
    return training.model_copy(update=changes)
