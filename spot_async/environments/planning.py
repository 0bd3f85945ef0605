"""Plans a run's environment: asks its processes what it is, and sees that the chat template can show its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from spot_async.base.tasks import gather
from spot_async.config import EnvironmentConfig
from spot_async.environments.served import ServedEnvironment
from spot_async.errors import ConfigError
from spot_async.models.bridges import Bridges
from spot_async.models.calls import check_calls, response_template
from spot_async.models.episodes import Tools
from spot_async.models.files import ModelFiles
from spot_async.types import Problem

ASKED_TWICE = 8  # problems whose opening must be the same when it is asked once more
OPENING_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Described:
    """What an environment says of itself."""

    reads_text: bool
    tools: Tools
    openings: Mapping[str, str]  # by the problem's id


@dataclass(frozen=True)
class PlannedEnvironment:
    """How a run's environment is played."""

    settings: EnvironmentConfig
    bridges: Bridges
    calls: Mapping[str, Any] | None  # what reads a turn's, beside its text; None: it reads the text


def described(settings: EnvironmentConfig | None, problems: Sequence[Problem]) -> Described:
    """Return what the environment says of itself and of the problems; none says nothing. Its processes are gone then.

    Raises ConfigError, also for an opening that depends on more than its problem.
    """
    if settings is None:
        return Described(False, (), {})
    with ThreadPoolExecutor(1) as thread:  # the caller may have a loop
        return thread.submit(asyncio.run, _described(settings, problems)).result()


async def _described(settings: EnvironmentConfig, problems: Sequence[Problem]) -> Described:
    async with ServedEnvironment(settings) as served:
        deadline = asyncio.get_running_loop().time() + OPENING_TIMEOUT_S

        async def opening(problem: Problem, seed: int) -> str:
            return await served.opening(problem, seed=seed, deadline=deadline)

        if not served.resets:
            return Described(served.reads_text, served.tools(), {})
        said, again = [await gather(opening(each, seed) for each in problems[:ASKED_TWICE]) for seed in (0, 1)]
        for problem, first, second in zip(problems, said, again, strict=False):
            if first != second:
                raise ConfigError(
                    f"environment.object: what `reset` says of problem {problem.id!r} was {first[:60]!r}, then "
                    f"{second[:60]!r}: its opening depends on more than the problem, and prompts are made once"
                )
        said += await gather(opening(each, 0) for each in problems[ASKED_TWICE:])
        return Described(
            served.reads_text, served.tools(), {each.id: text for each, text in zip(problems, said, strict=True)}
        )


def opened(problems: Sequence[Problem], found: Described) -> list[Problem]:
    """Return the problems with what the environment says of each behind their text."""
    return [
        msgspec.structs.replace(each, opening=text) if (text := found.openings.get(each.id)) else each
        for each in problems
    ]


def plan_environment(
    settings: EnvironmentConfig | None,
    found: Described,
    student: ModelFiles,
    arguments: Mapping[str, Any],
    teachers: Mapping[str, ModelFiles] | None = None,
) -> PlannedEnvironment | None:
    """Return how it is played, by the chat template. `arguments` are those of prompts, and `teachers` by role.

    Raises ConfigError, also for a teacher that ends turns otherwise: of a response the last token alone is replaced.
    """
    if settings is None:
        return None
    bridges = Bridges(student.vocabulary, arguments, found.tools, role=settings.role, history=settings.history)
    for role, files in (teachers or {}).items():
        if bridges.turn_end not in files.vocabulary.end_token_ids:
            token = student.vocabulary.tokenizer.convert_ids_to_tokens(bridges.turn_end)
            raise ConfigError(
                f"environment: student and {role} end a turn with different tokens (the student with {token!r}): take "
                f"a teacher of the student's family, or add the token to eos_token_id of {files.directory}"
            )
    if found.reads_text:
        return PlannedEnvironment(settings, bridges, None)
    template = response_template(student.vocabulary, bridges.template_text, settings.calls)
    check_calls(bridges, template, found.tools, settings.calls)
    form = {"template": template, "tools": found.tools, "prompt": bridges.generation_prompt}
    return PlannedEnvironment(settings, bridges, form)
