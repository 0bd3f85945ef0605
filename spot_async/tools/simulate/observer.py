"""Measures a simulated run as it goes: iterations, lags, the supervision queue, and what its servers worked off."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spot_async.base.events import Event
from spot_async.loop.admission import AdmissionBook
from spot_async.loop.events import IterationFinished
from spot_async.telemetry.bottleneck import Bottleneck
from spot_async.telemetry.live_bottleneck import LiveBottleneck
from spot_async.tools.simulate.services import RatedServer
from spot_async.types import Sample


@dataclass(frozen=True)
class Observed:
    """One iteration."""

    ended_s: float
    train_s: float
    queued_prompts_s: float  # seconds that finished prompts waited for their batch, all together
    most_queued: int
    worked: Mapping[str, float]  # by role: grains that its servers have worked off since the start
    responses: int  # that were trained
    lags: Mapping[int, int]  # grains of responses by the iterations that their weights are behind
    bottleneck: Bottleneck  # since the iteration before


class Observer:
    """The listener that keeps finished iterations. Make it on the running loop."""

    def __init__(
        self, book: AdmissionBook, servers: Mapping[str, Sequence[RatedServer]], live: LiveBottleneck, judged: set[int]
    ) -> None:
        """`judged` are the iterations after which the bottleneck is asked for, each time since the last one."""
        self.iterations: list[Observed] = []
        self._book = book
        self._servers = servers
        self._live = live
        self._judged = judged
        self._since_s = asyncio.get_running_loop().time()
        self._queued = self._most_queued = 0
        self._queued_prompts_s = 0.0

    def on(self, event: Event) -> None:
        now_s = asyncio.get_running_loop().time()
        self._queued_prompts_s += self._queued * (now_s - self._since_s)
        self._since_s, self._queued = now_s, self._book.waiting
        self._most_queued = max(self._most_queued, self._queued)
        if isinstance(event, IterationFinished):
            self._finish(event, now_s)

    def _finish(self, event: IterationFinished, now_s: float) -> None:
        self.iterations.append(
            Observed(
                ended_s=now_s,
                train_s=event.times_s.train,
                queued_prompts_s=self._queued_prompts_s,
                most_queued=self._most_queued,
                worked={role: sum(each.worked for each in servers) for role, servers in self._servers.items()},
                responses=sum(sample.supervision is not None for sample in event.samples),
                lags=lags(event.iteration, event.samples),
                bottleneck=self._live.judge() if event.iteration in self._judged else Bottleneck(""),
            )
        )
        self._queued_prompts_s, self._most_queued = 0.0, self._queued


def lags(iteration: int, samples: Sequence[Sample]) -> Counter[int]:
    """Return the tokens of an iteration's samples by lag. Its weights are those after `iteration - 1` steps."""
    found: Counter[int] = Counter()
    for sample in samples:
        for span in () if sample.supervision is None else sample.supervision.version_spans:
            found[iteration - 1 - span.version.step] += span.end - span.start
    return found
