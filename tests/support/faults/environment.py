"""An environment whose workers die and hang, and that answers some turns twice."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

from faults.invariants import require
from spot_async.errors import TransientError
from spot_async.models.episodes import Action, Observation, Step
from spot_async.testing.environments import SimulatedEnvironment
from spot_async.testing.services import rng_of
from spot_async.types import Problem

# What may be wrong with one answer: the worker dies over it, never answers, or takes long. Or the answer is lost on its
# way, so that the same is asked again, and answered twice.
AnswerFault = Literal["dies", "hangs", "is late", "is not heard"]
LONGEST_DELAY_S = 20.0


class FaultyEnvironment(SimulatedEnvironment):
    """Raises `InvariantError` where an episode is told otherwise than it was played."""

    def __init__(self, latency_s: float) -> None:
        super().__init__(latency_s)
        self.faults: deque[AnswerFault] = deque()  # of its next answers
        self.raised = 0
        self.twice = 0  # turns that were asked again after they had been answered
        self._luck = rng_of("faults of the environment")  # no answer depends on them
        self._answers: dict[str, Observation] = {}  # by what led to them

    async def act(
        self, problem: Problem, steps: Sequence[Step], action: Action, *, seed: int, deadline: float
    ) -> Observation:
        actions = [*(step.action for step in steps), action]
        keys = [repr((problem.id, seed, actions[: n + 1])) for n in range(len(actions))]
        told, answered = [step.observation for step in steps], [self._answers.get(key) for key in keys]
        require(told == answered[:-1], "I16", f"{problem.id}: {answered[:-1]} was answered, and {told} is told")
        self.twice += answered[-1] is not None
        fault = self.faults.popleft() if self.faults else None
        if fault == "dies":
            await self._fail("a worker died over it")
        self._answers[keys[-1]] = found = await super().act(problem, steps, action, seed=seed, deadline=deadline)
        match fault:
            case "is not heard":
                await self._fail("the answer was lost")
            case "is late":
                await asyncio.sleep(LONGEST_DELAY_S * self._luck.random())
            case "hangs":
                await asyncio.get_running_loop().create_future()
        return found

    async def _fail(self, words: str) -> None:
        await asyncio.sleep(self.latency_s * self._luck.random())
        self.raised += 1
        raise TransientError(f"the environment: {words}")
