"""Prints every event of simulated runs with faults as JSON, by seed, to compare what several processes print.

python event_traces.py SEED ...
"""

from __future__ import annotations

import json
import re
import sys

from simulated_runs import run

from spot_async.loop.events import Evaluated, IterationFinished, PromptEnded


class Trace:
    """A listener that keeps a line of each event. Those with arrays are told apart by their numbers."""

    def __init__(self):
        self.lines = []

    def on(self, event):
        match event:
            case PromptEnded(prompt=prompt):
                shown = (prompt.ordinal, event.outcome, event.started_s, event.ended_s, repr(event.error))
            case IterationFinished():
                shown = (event.iteration, event.times_s, event.report.snapshot.version)
            case Evaluated():
                shown = (event.iteration, event.seconds)
            case _:
                shown = event
        self.lines.append(f"{type(event).__name__} {shown}")


def trace_of(seed):
    trace = Trace()
    found = run(seed, listeners=[trace])
    ended = [f"{found.seconds} {found.error}", *found.run.trainer.weights, *map(str, found.logs)]
    return [*trace.lines, *(re.sub(r"[^\s']+/step-", "step-", line) for line in ended)]  # in no two runs the same place


if __name__ == "__main__":
    sys.stdout.write(json.dumps({seed: trace_of(seed) for seed in map(int, sys.argv[1:])}))
