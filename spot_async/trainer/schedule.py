"""The learning rate of an iteration. A pure function, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from spot_async.config import TrainingConfig


def learning_rate(training: TrainingConfig, iteration: int, iterations: int) -> float:
    """Return the rate of all updates of `iteration` (0-based) in a run of `iterations`.

    Linear warm-up reaches the full rate at iteration `warmup_iterations`. The cosine then starts from it, and is 0
    after the last iteration.
    """
    warmup = training.warmup_iterations
    if iteration < warmup:
        return training.learning_rate * (iteration + 1) / (warmup + 1)
    if training.schedule == "constant":
        return training.learning_rate
    progress = (iteration - warmup) / (iterations - warmup)
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
