"""Plans environments: asks their processes what they are, and sees that the chat template can show their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
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


@dataclass(frozen=True, eq=False)
class Described:
    """What an environment says of itself."""

    settings: EnvironmentConfig
    reads_text: bool
    tools: Tools
    openings: Mapping[str, str]  # by the problem's id


@dataclass(frozen=True, eq=False)
class PlannedEnvironment:
    """How an environment is played."""

    settings: EnvironmentConfig
    bridges: Bridges
    calls: Mapping[str, Any] | None  # what reads a turn's, beside its text; None: it reads the text


def opened(
    problems: Sequence[Problem], environments: Mapping[str, EnvironmentConfig]
) -> tuple[list[Problem], dict[str, Described]]:
    """Return the problems with what environments say of them, and what each says of itself, by the set's key.

    Sets with equal ones share what is returned. Its processes are gone then. Raises ConfigError, also for an opening
    that depends on more than its problem.
    """
    found: dict[str, Described] = {}
    for settings in {each.model_dump_json(): each for each in environments.values()}.values():
        keys = [key for key, each in environments.items() if each == settings]
        own = [each for each in problems if each.set_key in keys]
        with ThreadPoolExecutor(1) as thread:  # the caller may have a loop
            about = thread.submit(asyncio.run, _described(settings, own)).result()
        found |= dict.fromkeys(keys, about)
    return [_opened(each, found[each.set_key]) if each.set_key in found else each for each in problems], found


def _opened(problem: Problem, found: Described) -> Problem:
    opening = found.openings.get(problem.id, "")
    return msgspec.structs.replace(problem, opening=opening, tools=found.tools)


async def _described(settings: EnvironmentConfig, problems: Sequence[Problem]) -> Described:
    async with ServedEnvironment(settings) as served:
        deadline, tools = asyncio.get_running_loop().time() + OPENING_TIMEOUT_S, tuple(served.tools())

        async def opening(problem: Problem, seed: int) -> str:
            return await served.opening(problem, seed=seed, deadline=deadline)

        if not served.resets:
            return Described(settings, served.reads_text, tools, {})
        said, again = [await gather(opening(each, seed) for each in problems[:ASKED_TWICE]) for seed in (0, 1)]
        for problem, first, second in zip(problems, said, again, strict=False):
            if first != second:
                raise ConfigError(
                    f"environment.object: what `reset` says of problem {problem.id!r} was {first[:60]!r}, then "
                    f"{second[:60]!r}: its opening depends on more than the problem, and prompts are made once"
                )
        said += await gather(opening(each, 0) for each in problems[ASKED_TWICE:])
        openings = {each.id: text for each, text in zip(problems, said, strict=True)}
        return Described(settings, served.reads_text, tools, openings)


def plan_environments(
    found: Mapping[str, Described],
    student: ModelFiles,
    arguments: Mapping[str, Any],
    teachers: Mapping[str, ModelFiles] = MappingProxyType({}),
    teacher_responses: int = 0,
) -> dict[str, PlannedEnvironment]:
    """Return how they are played, by the chat template. `arguments` are those of prompts, and `teachers` by role.
    `teacher_responses`: how many they write for a prompt.

    Raises ConfigError, also for a teacher that ends turns otherwise: of a response the last token alone is replaced,
    and of what a teacher writes every end token.
    """
    planned = {each: _planned(each, student, arguments) for each in dict.fromkeys(found.values())}
    ours = student.vocabulary.end_token_ids
    for role, files in teachers.items():
        theirs = files.vocabulary.end_token_ids
        for turn_end in {each.bridges.turn_end for each in planned.values()}:
            if turn_end not in theirs or (teacher_responses and theirs[0] != ours[0]):
                token = student.vocabulary.tokenizer.convert_ids_to_tokens(turn_end)
                raise ConfigError(
                    f"environment: student and {role} end a turn with different tokens (the student with {token!r}): "
                    f"take a teacher of the student's family, or give {files.directory} the student's eos_token_id"
                )
    return {key: planned[each] for key, each in found.items()}


def _planned(found: Described, student: ModelFiles, arguments: Mapping[str, Any]) -> PlannedEnvironment:
    settings = found.settings
    bridges = Bridges(student.vocabulary, arguments, found.tools, role=settings.role, history=settings.history)
    if found.reads_text:
        return PlannedEnvironment(settings, bridges, None)
    template = response_template(student.vocabulary, bridges.template_text, settings.calls)
    check_calls(bridges, template, found.tools, settings.calls)
    form = {"template": template, "tools": found.tools, "prompt": bridges.generation_prompt}
    return PlannedEnvironment(settings, bridges, form)
