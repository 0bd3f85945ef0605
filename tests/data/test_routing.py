"""`policy.route`: which of several teachers a problem's prompts ask, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from problem_files import write

from spot_async.config import ProblemSetConfig, RouteConfig
from spot_async.data.problem_set import load_problem_set
from spot_async.data.routing import routed
from spot_async.errors import ConfigError, DataError
from spot_async.types import Problem

KINDS = ("algebra", "geometry", "python", None)
PROBLEMS = [
    Problem(id=f"p{n}", text="?", answer="1", category=kind, tier="hard" if n else "easy", domain="left" if n else None)
    for n, kind in enumerate(KINDS)
]


def teachers_of(route: object, teachers: tuple[str, ...] = ("math", "code")) -> list[str]:
    return [each.teacher for each in routed(PROBLEMS, RouteConfig.model_validate(route), teachers)]


def test_a_mapping_is_short_for_a_route_by_category():
    short = {"python": "code", "default": "math"}
    assert teachers_of(short) == ["math", "math", "code", "math"]
    assert teachers_of({"by": "category", "to": {"python": "code"}, "default": "math"}) == teachers_of(short)


def test_a_route_goes_by_the_tier_or_any_column_and_says_what_decided():
    assert teachers_of({"by": "tier", "to": {"easy": "code", "hard": "math"}}) == ["code", "math", "math", "math"]
    by_column = RouteConfig(by="side", to={"left": "math"}, default="code")
    found = routed(PROBLEMS, by_column, ("math", "code"))
    assert [(each.domain, each.teacher) for each in found[:2]] == [(None, "code"), ("left", "math")]


@pytest.mark.parametrize(
    ("route", "teachers", "line"),
    [
        (
            {"algebra": "math", "python": "code"},
            ("math", "code"),
            "policy.route: no teacher is named for category 'geometry', None (2 problems, the first is 'p1'): add it "
            "to policy.route.to, or give policy.route.default",
        ),
        (
            {"algebra": "maths", "default": "code"},
            ("math", "code"),
            "policy.route.to.algebra=maths: no such teacher: `teachers` has math, code: name one of those",
        ),
        (
            {"by": "tier", "to": {}, "default": "mth"},
            ("math",),
            "policy.route.default=mth: no such teacher: `teachers` has math: name one of those",
        ),
        (
            {"algebra": "math"},
            (),
            "policy.route.to.algebra=math: no such teacher: `teachers` has none: name one of those",
        ),
        (
            {"logic": "code", "default": "math"},
            ("math", "code"),
            "teachers.code: policy.route gives it no problem of data.train: remove it, or route some",
        ),
    ],
)
def test_what_leaves_a_problem_without_a_teacher_or_a_teacher_without_a_problem_is_one_line(route, teachers, line):
    with pytest.raises(ConfigError) as refused:
        teachers_of(route, teachers)
    assert str(refused.value) == line


def test_a_column_that_no_row_has_is_named(tmp_path: Path):
    path = write(tmp_path, [{"problem": "1+1", "answer": "2", "side": "left"}])
    settings = ProblemSetConfig(path=path, fields={"domain": "side"})
    assert load_problem_set(settings, "data.train").problems[0].domain == "left"
    with pytest.raises(DataError, match=r"no column 'sides', which policy.route.by names"):
        load_problem_set(settings.model_copy(update={"fields": {"domain": "sides"}}), "data.train")
