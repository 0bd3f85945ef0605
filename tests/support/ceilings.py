"""What the house may have at most, and how that may change. Pure.

The file has a ceiling for each room of the product and for each other count, the bounds of issues, and a list of what
raised a ceiling. A ceiling may fall at any time. It rises only in a commit that adds rows to the list.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MOVED = "moved"  # in place of an issue: lines that another room lost in the same commit


@dataclass(frozen=True)
class Rise:
    """A row of the list: what is raised by how much, and why."""

    room: str  # or another count
    by: int
    issue: str  # its title, or `MOVED`
    what_for: str = ""


@dataclass(frozen=True)
class Ceilings:
    """One version of the file."""

    rooms: Mapping[str, int]  # lines
    others: Mapping[str, int]
    bounds: Mapping[str, int]  # by title of the issue: product lines that it may add
    rises: Sequence[Rise]  # in the order of time

    @property
    def all(self) -> dict[str, int]:
        return {**self.rooms, **self.others}


def read_ceilings(text: str) -> Ceilings:
    tree = tomllib.loads(text)
    return Ceilings(
        rooms=tree["rooms"],
        others=tree["others"],
        bounds={each["title"]: each["product_lines"] for each in tree.get("issue", ())},
        rises=[Rise(**each) for each in tree.get("rise", ())],
    )


def wrong_rows(ceilings: Ceilings) -> Iterator[str]:
    """Yield what is wrong with the list of one version."""
    added: Counter[str] = Counter()
    for each in ceilings.rises:
        if each.by <= 0:
            yield f"{each.room}: a row raises"
        if each.issue != MOVED and each.issue not in ceilings.bounds:
            yield f"{each.room}: no issue has the title {each.issue!r}"
        if each.room in ceilings.others and (each.issue == MOVED or not each.what_for):
            yield f"{each.room}: name the issue and what it is for"
        if each.room not in ceilings.others:  # also one that is gone by now
            added[each.issue] += each.by
    for title, bound in ceilings.bounds.items():
        if added[title] > bound:
            yield f"{title}: its rows add {added[title]} product lines, and its bound is {bound}"


def loosened(before: Ceilings, after: Ceilings) -> Iterator[str]:
    """Yield what became looser from one version to the next without a row that allows it."""
    if list(after.rises[: len(before.rises)]) != list(before.rises):
        yield "rows of the list are kept as they are"
        return
    for title, bound in before.bounds.items():
        if after.bounds.get(title) != bound:
            yield f"{title}: its bound is kept as it is"
    new = after.rises[len(before.rises) :]
    allowed = Counter[str]()
    for each in new:
        allowed[each.room] += each.by
        if each.room not in after.all:
            yield f"{each.room}: no such ceiling"
    for name, ceiling in after.all.items():
        rise = ceiling - before.all.get(name, 0)
        if rise > allowed[name]:
            yield f"{name}: rises by {rise}, and new rows allow {allowed[name]}"
    for name in before.others.keys() - after.others.keys():
        yield f"{name}: is counted no more"
    moved = sum(each.by for each in new if each.issue == MOVED)
    lost = sum(max(0, ceiling - after.rooms.get(name, 0)) for name, ceiling in before.rooms.items())
    if moved > lost:
        yield f"{moved} lines moved, and other rooms fell by {lost}"
