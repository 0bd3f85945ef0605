"""From the configuration of a problem set to its problems: rows in, drafts mended, duplicates out, all counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from spot_async.config import ProblemSetConfig
from spot_async.data.layouts import LAYOUTS, Layout, recognise
from spot_async.data.parts import read_draft
from spot_async.data.rows import Row, read_rows
from spot_async.errors import DataError
from spot_async.types import Problem
from spot_async.verification.normalization import normalize_answer

_Sameness: TypeAlias = Callable[[str], str]  # what two texts have in common that count as the same
_SAMENESS: dict[str, _Sameness] = {"exact": lambda text: text, "spacing": lambda text: " ".join(text.split())}


@dataclass
class ProblemSet:
    """The problems of a set in the order of their files, and what became of the rows."""

    problems: list[Problem] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)  # of each file
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    mended: Counter[str] = field(default_factory=Counter)  # rows by what was done to them

    @property
    def counts(self) -> dict[str, int]:
        """Flat, for records: `read`, `problems`, and one entry for each reason to drop and each kind of mending."""
        dropped = {f"dropped: {why}": rows for why, rows in self.dropped.items()}
        mended = {f"mended: {what}": rows for what, rows in self.mended.items()}
        return {"read": self.read, "problems": len(self.problems), **dropped, **mended}


def load_problem_set(settings: ProblemSetConfig, key: str) -> ProblemSet:
    """Read, mend and filter the problems that `key` of the configuration describes.

    Problems are dropped, and counted, for reasons of their layout, as duplicates, and as duplicates whose answers
    differ. Raises DataError, naming file and line, for a row that cannot be used otherwise, for an id that is used
    twice and when nothing is left.
    """
    found = ProblemSet()
    kept: dict[object, _Kept] = {}
    for problem, where, layout in _read(settings, key, found):
        keeps = layout.keeps_duplicates or settings.duplicates == "keep"
        same = len(kept) if keeps else _SAMENESS[settings.duplicates](problem.text)
        first = kept.setdefault(same, _Kept(problem, where))
        if first.problem is not problem:
            first.repeated += 1
            if normalize_answer(problem.answer) != normalize_answer(first.problem.answer):
                first.is_contradicted = True
    where_of_id: dict[str, str] = {}
    for each in kept.values():
        found.dropped["conflicting answers"] += (1 + each.repeated) * each.is_contradicted
        found.dropped["duplicate"] += each.repeated * (not each.is_contradicted)
        if each.is_contradicted:
            continue
        number_or_place = where_of_id.setdefault(each.problem.id, each.where)
        if number_or_place != each.where:
            raise DataError(f"{each.where}: id {each.problem.id!r} was used in {number_or_place} already")
        found.problems.append(each.problem)
    found.dropped = +found.dropped  # without those that are zero
    if not found.problems:
        raise DataError(f"{', '.join(settings.paths)}: no problems in it")
    return found


@dataclass
class _Kept:
    """The first row with some text, and what later rows with the same text say."""

    problem: Problem
    where: str
    repeated: int = 0
    is_contradicted: bool = False


def _read(settings: ProblemSetConfig, key: str, found: ProblemSet) -> Iterator[tuple[Problem, str, Layout]]:
    """Every problem of every file with its place and its layout; counts what is read, mended and dropped."""
    for number, path in enumerate(settings.paths, start=1):
        prefix = f"{number}/" if len(settings.paths) > 1 else ""  # ids are those of one file
        name: str = settings.layout
        for row in read_rows(path, settings, key):
            found.read += 1
            if row.number == 1:
                name = _layout_of(settings, row)
                found.layouts.append(name)
            problem = _problem(row, LAYOUTS[name], prefix, settings, key, found)
            if problem is not None:
                yield problem, row.where, LAYOUTS[name]


def _layout_of(settings: ProblemSetConfig, row: Row) -> str:
    if settings.layout != "auto":
        return settings.layout
    return "columns" if settings.fields else recognise(row.columns)


def _problem(
    row: Row, layout: Layout, prefix: str, settings: ProblemSetConfig, key: str, found: ProblemSet
) -> Problem | None:
    row = row._replace(columns=layout.prepare(row.columns))
    draft = read_draft(row, layout.columns_of, settings.fields, key, needs_answer=layout.needs_answer)
    found.mended.update(done for mend in layout.mends if (done := mend(draft)))
    if reason := next((reason for refuses in layout.refusals if (reason := refuses(draft))), None):
        found.dropped[reason] += 1
        return None
    if not draft.problem.strip() or (layout.needs_answer and not draft.gold):
        raise DataError(f"{row.where}: `{'answer' if draft.problem.strip() else 'problem'}` is empty")
    return draft.finish(prefix, row.number)
