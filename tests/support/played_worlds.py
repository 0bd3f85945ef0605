"""Episodes of `toy_worlds.py`, turn by turn, by worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from deadlines import soon

from spot_async.config import EnvironmentConfig
from spot_async.environments.served import ServedEnvironment
from spot_async.models.episodes import Action, Call, Observation, Step
from spot_async.types import Problem

TOYS = {"object": "toy_worlds:Toys", "workers": 1, "timeout_s": 60.0}
PROBLEM = Problem(id="p7", text="How many?", answer="41", tier="hard")


@asynccontextmanager
async def opened(**changes: Any) -> AsyncIterator[ServedEnvironment]:
    async with ServedEnvironment(EnvironmentConfig.model_validate(TOYS | changes)) as environment:
        yield environment


async def play(
    environment: ServedEnvironment,
    steps: list[Step],
    *calls: Call,
    text: str = "",
    problem: Problem = PROBLEM,
    seconds: float = 600.0,
) -> Observation:
    """Play a turn, and add it to the steps."""
    action = Action(text=text, calls=calls)
    answered = await environment.act(problem, steps, action, seed=1, deadline=soon(seconds))
    steps.append(Step(action=action, observation=answered))
    return answered


def count(by: int = 1) -> Call:
    return Call("count", {"by": by})


def run(code: str) -> Call:
    return Call("run", {"code": code})
