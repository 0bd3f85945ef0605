"""Which of several teachers each problem's prompts ask: `policy.route`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from spot_async.config import RouteConfig
from spot_async.errors import ConfigError
from spot_async.types import Problem


def routed(problems: Sequence[Problem], route: RouteConfig, teachers: Collection[str]) -> list[Problem]:
    """Return the problems, each with its teacher's name and the value that decided it.

    Raises ConfigError unless there is a teacher for each problem, and a problem for each teacher.
    """
    keys = {**{f"to.{value}": name for value, name in route.to.items()}, "default": route.default}
    for key, name in keys.items():
        if name is not None and name not in teachers:
            known = ", ".join(teachers) or "none"
            raise ConfigError(f"policy.route.{key}={name}: no such teacher: `teachers` has {known}: name one of those")
    found = [_routed(problem, route) for problem in problems]
    if nobodys := [each for each in found if not each.teacher]:
        first, values = nobodys[0], ", ".join(sorted({repr(each.domain) for each in nobodys}))
        raise ConfigError(
            f"policy.route: no teacher is named for {route.by} {values} ({len(nobodys)} problems, the first is "
            f"{first.id!r}): add it to policy.route.to, or give policy.route.default"
        )
    asked = {each.teacher for each in found}
    if idle := [name for name in teachers if name not in asked]:
        raise ConfigError(
            f"teachers.{idle[0]}: policy.route gives it no problem of data.train: remove it, or route some"
        )
    return found


def _routed(problem: Problem, route: RouteConfig) -> Problem:
    value = {"category": problem.category, "tier": problem.tier}.get(route.by, problem.domain)
    teacher = route.default if value is None else route.to.get(value, route.default)
    return msgspec.structs.replace(problem, domain=value, teacher=teacher or "")
