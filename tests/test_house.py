"""The house in numbers: what it has stays below `ceilings.toml`, and that file is loosened only as it says."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import house
import pytest
from ceilings import Ceilings, Rise, loosened, read_ceilings, wrong_rows

CEILINGS = Path(__file__).parent / "ceilings.toml"
SLACK_LINES = 25  # below a ceiling; what lost more lowers it (`python tests/support/house.py --lower`)


def test_nothing_is_above_its_ceiling_and_ceilings_fall_with_what_goes() -> None:
    found = read_ceilings(CEILINGS.read_text())
    sizes = {**house.rooms(), **house.measured()}
    assert sizes.keys() == found.all.keys()
    above = {name: f"{size} of {found.all[name]}" for name, size in sizes.items() if size > found.all[name]}
    assert not above, "add a row to ceilings.toml: an issue's, or `moved`"
    slack = {name: SLACK_LINES if name in found.rooms or name.startswith("lines of") else 0 for name in sizes}
    idle = {
        name: f"{size} of {found.all[name]}" for name, size in sizes.items() if size + slack[name] < found.all[name]
    }
    assert not idle, "lower them: python tests/support/house.py --lower"


def test_the_list_of_rises_keeps_to_the_bounds_of_its_issues() -> None:
    assert list(wrong_rows(read_ceilings(CEILINGS.read_text()))) == []


def test_no_commit_has_loosened_a_ceiling_without_a_row() -> None:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=CEILINGS.parent, capture_output=True, text=True, check=True).stdout

    try:
        is_shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
        commits = git("log", "-m", "--first-parent", "--reverse", "--format=%H", "--", CEILINGS.name).split()
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no git history here")
    if is_shallow:
        pytest.skip("the history is not here")
    texts = [git("show", f"{commit}:./{CEILINGS.name}") for commit in commits]
    versions = [read_ceilings(text) for text in (*texts, CEILINGS.read_text())]
    wrong = [
        f"{commit[:12]}: {each}"
        for commit, before, after in zip([*commits[1:], "here"], versions, versions[1:], strict=False)
        for each in loosened(before, after)
    ]
    assert wrong == []


BEFORE = Ceilings({"loop": 100, "checks": 300}, {"pages": 5}, {"Turns": 40}, [Rise("loop", 10, "Turns")])


def after(rises: list[Rise], **changed: int) -> Ceilings:
    rooms = {**BEFORE.rooms, **{name: size for name, size in changed.items() if name != "pages"}}
    return replace(BEFORE, rooms=rooms, others={"pages": changed.get("pages", 5)}, rises=[*BEFORE.rises, *rises])


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (after([], loop=90), ""),
        (after([], loop=101), "loop: rises by 1, and new rows allow 0"),
        (after([], loop=101, checks=200), "loop: rises by 1, and new rows allow 0"),
        (after([], new=1), "new: rises by 1, and new rows allow 0"),
        (after([Rise("loop", 30, "Turns")], loop=130), ""),
        (after([Rise("loop", 30, "moved")], loop=130, checks=270), ""),
        (after([Rise("loop", 30, "moved")], loop=130, checks=271), "30 lines moved, and other rooms fell by 29"),
        (after([Rise("pages", 1, "Turns", "turns.md")], pages=6), ""),
        (after([], pages=6), "pages: rises by 1, and new rows allow 0"),
        (replace(BEFORE, rises=[]), "rows of the list are kept as they are"),
        (replace(BEFORE, bounds={"Turns": 41}), "Turns: its bound is kept as it is"),
        (replace(BEFORE, others={}), "pages: is counted no more"),
        (replace(BEFORE, rooms={"checks": 300}), ""),
        (after([Rise("lop", 1, "Turns")]), "lop: no such ceiling"),
    ],
)
def test_a_ceiling_rises_only_by_a_row(later: Ceilings, said: str) -> None:
    assert list(loosened(BEFORE, later)) == [said] * bool(said)


@pytest.mark.parametrize(
    ("rise", "said"),
    [
        (Rise("loop", 30, "Turns"), []),
        (Rise("loop", 31, "Turns"), ["Turns: its rows add 41 product lines, and its bound is 40"]),
        (Rise("loop", 1, "Tools"), ["loop: no issue has the title 'Tools'"]),
        (
            Rise("a room that is gone", 31, "Turns"),
            ["Turns: its rows add 41 product lines, and its bound is 40"],
        ),
        (Rise("loop", -1, "Turns"), ["loop: a row raises"]),
        (Rise("pages", 1, "Turns"), ["pages: name the issue and what it is for"]),
        (Rise("pages", 1, "moved", "elsewhere"), ["pages: name the issue and what it is for"]),
    ],
)
def test_a_row_names_an_issue_and_keeps_to_its_bound(rise: Rise, said: list[str]) -> None:
    assert list(wrong_rows(after([rise]))) == said


def test_no_modules_import_each_other() -> None:
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]  # or the next line would say nothing
    assert house.circles(house.import_graph()) == []


def test_relative_imports_reach_no_floor_that_others_may_not() -> None:
    """Between `backends`' folders: each may use its own and `shared`."""
    graph = house.import_graph()
    folder = {
        name: name.split(".")[2] for name in graph if name.startswith("spot_async.backends.") and name.count(".") > 2
    }
    wrong = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if name in folder and other in folder and folder[other] not in (folder[name], "shared")
    }
    assert not wrong
