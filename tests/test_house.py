"""The house in numbers: CONTRIBUTING.md says them, so that whoever adds to it has to change the page (rule 8)."""

from __future__ import annotations

import re
from pathlib import Path

import house

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
GROWS_BY_THE_LINE = {"product lines", "lines of pages", "lines of tests"}  # said to the hundred, within five


def test_the_page_says_what_the_house_has() -> None:
    said = {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"^\| ([^|]+) \| ([\d,]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    }
    measured = house.measured()
    assert said.keys() == measured.keys()
    for name, number in measured.items():
        off = abs(said[name] - number)
        assert off <= (500 if name in GROWS_BY_THE_LINE else 0), f"{name}: {number} (`make house`)"


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
