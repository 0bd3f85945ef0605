"""Simulates time and services for tests: ours, and those of your own policies and backends.

No run imports it. `spot-async simulate` runs on it.

A test of a policy begins with one of two names: `ScriptedStages` for one prompt with numbers that the test chooses, or
`simulated_run` for a whole run.
"""

from spot_async.testing.services import capabilities, generation, token_scores
from spot_async.testing.simulation import (
    ScriptedStages,
    SimulatedRun,
    advantages_of,
    make_policy,
    make_run,
    policy_context,
    simulated_prompts,
    simulated_run,
)
from spot_async.testing.virtual_time import run_on_virtual_time

__all__ = [
    "ScriptedStages",
    "SimulatedRun",
    "advantages_of",
    "capabilities",
    "generation",
    "make_policy",
    "make_run",
    "policy_context",
    "run_on_virtual_time",
    "simulated_prompts",
    "simulated_run",
    "token_scores",
]
