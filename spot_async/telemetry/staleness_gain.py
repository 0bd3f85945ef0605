"""Estimates what staleness would bring a strict run, from the times that were measured of it. Pure arithmetic.

With `max_staleness: n`, sampling, training and updates of n + 1 batches overlap. So an iteration takes at least
`max(bound, T / (n + 1))` seconds, where T is what it takes now. `bound` is what the busiest part needs for one
iteration if it is never idle: the trainer, the weight update, or the servers of a role. For servers that is the time
of all their requests over the most that could be under way together, which is never more than they need.

Nothing is promised. A method with two long tails in a row, such as SPOT's rollouts and probes, stays above this bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from spot_async.stages.services import STAGE_SERVERS

FEWEST_ITERATIONS = 2
WORTH = 0.15  # staleness is spoken of only if it could save this share of an iteration
STALENESS = 1  # of which is spoken: it brings most of what any brings


@dataclass(frozen=True)
class StageTotal:
    """A stage's requests in a whole run, or in a part of it."""

    busy_s: float  # of all requests together, from their turns to their answers
    requests: float
    limit: int


@dataclass(frozen=True)
class StrictTimes:
    """Where the time of strict iterations went, evaluations left out."""

    iterations: int
    wait_s: float
    train_s: float
    update_s: float
    stages: Mapping[str, StageTotal] = field(default_factory=dict)

    @property
    def iteration_s(self) -> float:
        return (self.wait_s + self.train_s + self.update_s) / self.iterations

    def bound_s(self, max_staleness: int) -> float:
        """Return the least seconds of an iteration with this staleness."""
        batches = max_staleness + 1
        busy_s: dict[str, float] = defaultdict(float)
        most: dict[str, float] = defaultdict(float)  # requests that could be under way
        for stage, total in self.stages.items():
            busy_s[STAGE_SERVERS[stage]] += total.busy_s
            most[STAGE_SERVERS[stage]] += min(total.limit, batches * total.requests / self.iterations)
        servers_s = [busy_s[server] / most[server] for server in most if most[server]]
        parts_s = max(self.train_s, self.update_s, *servers_s, 0.0) / self.iterations
        return max(parts_s, self.iteration_s / batches)


def gain_words(times: StrictTimes | None) -> str:
    """Return what staleness could bring, in one sentence. Empty where it is not worth it or nothing was measured."""
    if times is None or times.iterations < FEWEST_ITERATIONS or times.iteration_s <= 0:
        return ""
    now_s, then_s = times.iteration_s, times.bound_s(STALENESS)
    if 1 - then_s / now_s < WORTH:
        return ""
    idle = 1 - times.train_s / times.iterations / now_s
    return (
        f"the trainer idles {100 * idle:.0f} %: max_staleness={STALENESS} would bring an iteration from "
        f"{_seconds(now_s)} to {_seconds(then_s)} at best"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
