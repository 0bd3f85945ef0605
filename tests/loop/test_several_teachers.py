"""Simulated runs with two teachers that go wrong, each by itself: the invariants of runs hold."""

from __future__ import annotations

import pytest
from faults.run import FaultyRun, faulty_run
from several_teachers import AsksAll

from spot_async.testing.simulation import make_policy, policy_context

NAMES = ("math", "code")
SEEDS = 24


def run(seed: int) -> FaultyRun:
    policy = make_policy(AsksAll, policy_context(teachers=NAMES))
    return faulty_run(seed, policy, max_staleness=seed % 3)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_invariants_hold_whatever_happens_to_either(seed: int) -> None:
    found = run(seed)
    asked = {stage.name: stage.counters.completed for stage in found.run.stages.all}
    assert asked["score.math"] or found.error is not None
    for supervision in found.run.trained:
        assert len(supervision.pulls) == len(NAMES)
