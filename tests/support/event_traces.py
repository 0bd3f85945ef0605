"""Prints every event of simulated runs as JSON, by seed, so that a test can compare what several processes print.

python event_traces.py SEED ...
"""

from __future__ import annotations

import json
import random
import sys

import structlog
from simulated_replicas import at_random, servers, train

from spot_async.errors import PermanentError
from spot_async.testing.servers import SimulatedReplica


class Refusing(SimulatedReplica):
    """Refuses some probes after they have run, so that other requests of their prompts are cancelled."""

    async def generate(self, prompt_ids, sampling, **rest):
        generation = await super().generate(prompt_ids, sampling, **rest)
        if sampling.max_tokens < 64 and sampling.seed % 12 == 0:
            raise PermanentError("400: refused")
        return generation


class Listener:
    """Keeps everything that it is told, in order."""

    def __init__(self):
        self.events = []

    def on(self, event):
        self.events.append(repr(event))


def events_of(seed):
    listener = Listener()
    with structlog.testing.capture_logs() as logs:
        train(
            servers(2 + seed % 2),
            at_random(random.Random(seed)),
            make=Refusing,
            are_ours=seed % 4 < 2,
            recovery_timeout_s=3000.0,
            max_dead_share=1.0,
            listener=listener,
        )
    return [*listener.events, *map(repr, logs)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({seed: events_of(seed) for seed in map(int, sys.argv[1:])}))
