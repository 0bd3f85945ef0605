"""What training defaults to where samples may lag behind the weights."""

from __future__ import annotations

from typing import Any

import pytest

from spot_async.config import TrainingConfig


@pytest.mark.parametrize(
    ("stated", "behavior", "cap"),
    [
        ({}, "recomputed", 2.0),
        ({"behavior": "recomputed"}, "recomputed", 2.0),
        ({"behavior": "recomputed", "importance_cap": 1.5}, "recomputed", 1.5),
        ({"behavior": "served"}, "served", None),
    ],
)
def test_with_staleness_pi_old_is_recomputed_unless_the_configuration_says_otherwise(
    stated: dict[str, Any], behavior: str, cap: float | None
) -> None:
    written = TrainingConfig(iterations=1, **stated)
    training = TrainingConfig.model_validate_json(
        written.model_dump_json()
    )  # as a run's own config.yaml states all keys
    found = training.under_staleness(max_staleness=1)
    assert (found.behavior, found.importance_cap) == (behavior, cap)
    strict = training.under_staleness(max_staleness=0)
    assert (strict.behavior, strict.importance_cap) == (stated.get("behavior", "served"), stated.get("importance_cap"))


def test_the_oldest_weights_that_may_be_served_with_staleness_are_kept() -> None:
    """Training begins a step with the served weights at most n behind, and publishes one more: n + 2 in all."""
    least = TrainingConfig(iterations=1, keep_weights=2)
    assert [least.under_staleness(n).keep_weights for n in range(4)] == [2, 3, 4, 5]
