"""Plays a few episodes with a run's student and each environment, and one of them again in new processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import msgspec

from spot_async.base.tasks import gather
from spot_async.base.text import counted
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.environments.served import ServedEnvironment
from spot_async.errors import ConfigError, RequestError
from spot_async.loop.events import mean_metrics
from spot_async.models.episodes import Action, Observation, Step
from spot_async.protocols import Environment, Verifier
from spot_async.running.assembly import RunEnvironment, make_stages
from spot_async.running.services import OpenServices
from spot_async.stages.services import requests_per_prompt
from spot_async.types import Problem, Prompt, Sample

EPISODES = 8
AGAIN_TIMEOUT_S = 600.0


class PlayedEpisodes(msgspec.Struct, frozen=True, kw_only=True):
    """What a few episodes showed."""

    sets: Sequence[str]  # whose environment it is; empty for the only one of a run
    episodes: int
    means: Mapping[str, float]  # of their metrics
    ended: Mapping[str, int]
    replayed_steps: int  # that were answered alike by new processes

    @property
    def words(self) -> str:
        ends = ", ".join(f"{many} by {why}" for why, many in sorted(self.ended.items()))
        again = f"{counted(self.replayed_steps, 'step')} played again in a new process: the same"
        turns, *shares = (self.means[f"environment/{name}"] for name in ("turns", "calls", "errors", "unreadable"))
        whose = f" of {' and '.join(self.sets)}" if self.sets else ""
        return (
            f"environment{whose}: {counted(self.episodes, 'episode')}: {turns:.1f} turns, {shares[0]:.0%} had an "
            f"answer, {shares[1]:.0%} an error, {shares[2]:.0%} a call that could not be read; ended {ends}. "
            + (again if self.replayed_steps else "Nothing was played again")
        )


class _Noting:
    """An environment that remembers the longest episode."""

    def __init__(self, asked: Environment) -> None:
        self._asked = asked
        self.longest: tuple[Problem, int, list[Step]] | None = None
        self.opening, self.reward = asked.opening, asked.reward

    async def act(
        self, problem: Problem, steps: Sequence[Step], action: Action, *, seed: int, deadline: float
    ) -> Observation:
        observation = await self._asked.act(problem, steps, action, seed=seed, deadline=deadline)
        if self.longest is None or len(steps) >= len(self.longest[2]):
            self.longest = problem, seed, [*steps, Step(action=action, observation=observation)]
        return observation


async def play_episodes(
    config: Config,
    plan: TrainPlan,
    services: OpenServices,
    verifier: Verifier,
    environments: Mapping[str, RunEnvironment],
) -> list[PlayedEpisodes]:
    """Play one response to each of a few prompts of every environment: the teacher's, where no student writes one.

    Raises ConfigError if new processes answer otherwise.
    """
    noting = {each: _Noting(each.served) for each in dict.fromkeys(environments.values())}
    for environment, server in noting.items():
        environment.service = replace(environment.service, server=server)
    stages = make_stages(config, plan, services, verifier, environments)

    async def played(prompt: Prompt) -> Sample:
        bound = stages.for_prompt(prompt)
        if requests_per_prompt(plan.policy.needs)["rollout"]:
            response = await bound.rollout()
        else:
            response = await bound.teacher_response(teacher=next(iter(bound.teachers)))
        bare = Sample(supervision=None, metrics={}, record={"response_ids": response.token_ids})
        return bound.recorded([bare])[0]

    found = []
    for environment, server in noting.items():
        sets = [key for key, each in environments.items() if each is environment]
        prompts = (each for each in plan.schedule if each.problem.set_key in sets)
        samples = await gather(played(prompt) for prompt in islice(prompts, EPISODES))
        found.append(
            PlayedEpisodes(
                sets=sets if len(noting) > 1 else (),
                episodes=len(samples),
                ended=Counter(each.record["ended"] for each in samples),
                replayed_steps=await _steps_again(environment, server),
                means=mean_metrics([each.metrics for each in samples]),
            )
        )
    return found


async def _steps_again(environment: RunEnvironment, noting: _Noting) -> int:
    """Have new processes answer the longest episode's last step, and return how many they played for that."""
    if noting.longest is None or not environment.served.settings.replayable:
        return 0
    problem, seed, steps = noting.longest
    async with ServedEnvironment(environment.served.settings) as again:
        deadline = asyncio.get_running_loop().time() + AGAIN_TIMEOUT_S
        *before, last = steps
        try:
            now = await again.act(problem, before, last.action, seed=seed, deadline=deadline)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        if now != last.observation:
            raise ConfigError(
                f"environment: turn {len(steps)} of problem {problem.id!r} was answered differently when it was "
                f"played again: {last.observation.texts}, then {now.texts}: it depends on more than problem, seed "
                "and actions (environment.replayable)"
            )
    return len(steps)
