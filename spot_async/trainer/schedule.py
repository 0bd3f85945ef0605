"""The learning rate of an iteration. Pure functions, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from spot_async.config import TrainingConfig


def learning_rate(training: TrainingConfig, iteration: int, iterations: int) -> float:
    """Return the rate of all updates of `iteration` (0-based) in a run of `iterations`.

    Linear warm-up reaches the full rate at iteration `warmup_iterations`. The cosine then starts from it, and is 0
    after the last iteration, or after `schedule_iterations`.
    """
    warmup = training.warmup_iterations
    if iteration < warmup:
        return training.learning_rate * (iteration + 1) / (warmup + 1)
    if training.schedule == "constant":
        return training.learning_rate
    progress = (iteration - warmup) / ((training.schedule_iterations or iterations) - warmup)
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def schedule_words(training: TrainingConfig, iterations: int) -> str:
    """Return the course of the learning rate in a run of `iterations`, for people."""
    warmup = f"after a warm-up of {training.warmup_iterations}, " if training.warmup_iterations else ""
    if training.schedule == "constant":
        return f"{warmup}{training.learning_rate:.2g} throughout"
    ends = training.schedule_iterations or iterations
    last = learning_rate(training, iterations - 1, iterations)
    cut = f", of which {iterations} are trained" if ends > iterations else ""
    return f"{warmup}{training.learning_rate:.2g} falling to 0 over {ends} iterations{cut}; {last:.2g} in the last"


def seam_words(before: TrainingConfig, iterations_before: int, now: TrainingConfig, iterations: int, step: int) -> str:
    """Return what going on after `step` with another number of iterations does to the learning rate; empty if nothing.

    The cosine of a run that goes on for more iterations is stretched, so its rate rises where it goes on.
    """
    last = learning_rate(before, step - 1, iterations_before)
    following = learning_rate(before, step, iterations_before)
    rate = learning_rate(now, step, iterations)
    if step >= iterations or math.isclose(rate, following, rel_tol=1e-6, abs_tol=1e-6 * now.learning_rate):
        return ""
    ended, ends = before.schedule_iterations or iterations_before, now.schedule_iterations or iterations
    return (
        f"learning rate: {last:.2g} in iteration {step} and {rate:.2g} in iteration {step + 1}, since its cosine ended "
        f"after iteration {ended} and now ends after {ends} (training.schedule_iterations)"
    )
