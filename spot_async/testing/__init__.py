"""Simulates time and services for tests: ours, and those of your own policies and backends.

`spot-async simulate` runs on it, and a run rehearses its policy on it.

A test of a policy begins with one of two names: `ScriptedStages` for one prompt with numbers that the test chooses, or
`simulated_run` for a whole run.
"""

from spot_async.testing.losses import live_batch as live_batch
from spot_async.testing.losses import loss_of as loss_of
from spot_async.testing.services import capabilities as capabilities
from spot_async.testing.services import generation as generation
from spot_async.testing.services import token_scores as token_scores
from spot_async.testing.simulation import ScriptedStages as ScriptedStages
from spot_async.testing.simulation import SimulatedRun as SimulatedRun
from spot_async.testing.simulation import make_policy as make_policy
from spot_async.testing.simulation import make_run as make_run
from spot_async.testing.simulation import make_verifier as make_verifier
from spot_async.testing.simulation import policy_context as policy_context
from spot_async.testing.simulation import simulated_prompts as simulated_prompts
from spot_async.testing.simulation import simulated_run as simulated_run
from spot_async.testing.virtual_time import run_on_virtual_time as run_on_virtual_time
