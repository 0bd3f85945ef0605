"""A simulated environment, which answers whatever a model writes, and a student whose turns are short enough for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from spot_async.models.episodes import Action, Observation, ObservationKind, Step
from spot_async.models.vocabulary import Vocabulary
from spot_async.stages.episode import Rules
from spot_async.stages.services import EnvironmentService
from spot_async.testing.services import rng_of
from spot_async.types import IntArray, Problem


@dataclass
class SimulatedEnvironment:
    """Answers by what it was told alone: half of its second answers are errors, and the last of its turns ends all."""

    latency_s: float = 0.01
    requests: int = 0
    turns: Callable[[Problem], int] = lambda problem: 3
    workers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 30))  # each answers one turn

    async def opening(self, problem: Problem, *, seed: int, deadline: float) -> str:
        return ""

    async def act(
        self, problem: Problem, steps: Sequence[Step], action: Action, *, seed: int, deadline: float
    ) -> Observation:
        self.requests += 1
        async with self.workers:
            await asyncio.sleep(self.latency_s)
        rng = rng_of(problem.id, str(seed), *(step.observation.texts[0] for step in steps), action.text)
        kind: ObservationKind = "error" if len(steps) == 1 and rng.random() < 0.5 else "answer"
        texts = tuple(str(rng.integers(10, 60)) for _ in action.calls or "1")
        return Observation(texts=texts, kind=kind, is_done=len(steps) + 1 >= self.turns(problem))

    async def reward(self, problem: Problem, steps: Sequence[Step], *, seed: int, deadline: float) -> float | None:
        return len(steps) / 3


def simulated_environment(vocabulary: Vocabulary, **rules: object) -> EnvironmentService:
    """Return an environment that reads the text of turns, and joins them by a token on either side of its answer."""
    turn_end = vocabulary.end_token_ids[0]

    def between(texts: Sequence[str]) -> IntArray:
        ids = vocabulary.encode(" ".join(texts))
        return np.concatenate([ids[:1], ids, ids[:1]]).astype(np.int32)

    made = Rules(**{"vocabulary": vocabulary, "turn_end": turn_end, "between": between, **rules})  # type: ignore[arg-type]
    return EnvironmentService(server=SimulatedEnvironment(), rules=made)
