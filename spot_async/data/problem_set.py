"""From the configuration of a problem set to its problems: rows in, drafts mended, duplicates out, all counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from spot_async.config import Duplicates, ProblemSetConfig
from spot_async.data.keys import about, setting
from spot_async.data.layouts import LAYOUTS, Layout, recognise
from spot_async.data.overlap import identity
from spot_async.data.parts import read_draft
from spot_async.data.rows import Row, read_rows
from spot_async.errors import DataError
from spot_async.types import Problem
from spot_async.verification.normalization import normalize_answer

OWN_COLUMNS = {"problem", "answer", "choices", "solution"}  # whoever names one of these has no well-known file


@dataclass
class ProblemSet:
    """The problems of a set in the order of their files, and what became of the rows."""

    problems: list[Problem] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)  # of each file
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    mended: Counter[str] = field(default_factory=Counter)  # rows by what was done to them
    unanswered: int = 0  # rows without the answer that others of their layout have

    @property
    def layout(self) -> str:
        """In words: what `auto` takes where it knows the columns' names only is no layout that can be asked for."""
        names = ("auto, by the usual columns" if name == "columns" else name for name in self.layouts)
        return ", ".join(dict.fromkeys(names))

    @property
    def counts(self) -> dict[str, int]:
        """Flat, for records: `read`, `problems`, and one entry for each reason to drop and each kind of mending."""
        dropped = {f"dropped: {why}": rows for why, rows in self.dropped.items()}
        mended = {f"mended: {what}": rows for what, rows in self.mended.items()}
        unanswered = {"without an answer": self.unanswered} if self.unanswered else {}
        return {"read": self.read, "problems": len(self.problems), **dropped, **mended, **unanswered}


def load_problem_set(settings: ProblemSetConfig, key: str, *, needs_answers: bool = True) -> ProblemSet:
    """Read, mend and filter the problems that `key` of the configuration describes; empty where there is none.

    Without `needs_answers` a row may have none, except in layouts that drop such rows; see also `require_answers`.

    Rows are dropped, and counted, for reasons of their layout, because another row with the same text has another
    answer, and as duplicates where the settings or the layout say so. Raises DataError, naming file and line, for a
    row that cannot be used otherwise, for an id that is used twice and when nothing is left.
    """
    found = ProblemSet()
    groups: dict[object, _Group] = {}
    kept: list[tuple[Problem, str, _Group]] = []
    for problem, where, layout in _read(settings, key, found, needs_answers):
        duplicates = settings.duplicates or layout.duplicates
        group = groups.setdefault(_sameness(problem, duplicates, len(groups)), _Group(problem))
        group.rows += 1
        if problem.answer and group.answer:  # one without an answer contradicts none
            group.is_contradicted |= normalize_answer(problem.answer) != normalize_answer(group.answer)
        group.answer = group.answer or problem.answer
        if group.first is problem or duplicates == "conflicting":
            kept.append((problem, where, group))
            group.kept += 1
    found.dropped["conflicting answers"] = sum(group.rows for group in groups.values() if group.is_contradicted)
    found.dropped["duplicate"] = sum(g.rows - g.kept for g in groups.values() if not g.is_contradicted)
    found.dropped = +found.dropped  # without those that are zero
    where_of_id: dict[str, str] = {}
    for problem, where, group in kept:
        if group.is_contradicted:
            continue
        if (other := where_of_id.setdefault(problem.id, where)) != where:
            raise DataError(
                f"{about(key)}{where}: id {problem.id!r} was used in {other} already; correct it, or name another "
                f"column in {setting(key, 'fields.id')}"
            )
        found.problems.append(problem)
    if not found.problems:
        reasons = ", ".join(f"{why} {rows}" for why, rows in found.dropped.items())
        dropped = f", layout {found.layout}: {reasons}" if reasons else ""
        raise DataError(f"{about(key)}{', '.join(settings.paths)}: no problems in {found.read} rows{dropped}")
    return found


def require_answers(found: ProblemSet, key: str) -> None:
    """Raises DataError where a problem has none, since its layout reads none."""
    if problem := next((each for each in found.problems if not each.answer), None):
        raise DataError(
            f"{about(key)}problem {problem.id!r} has no answer, which layout {found.layout} does not read: name its "
            f"column in {setting(key, 'fields.answer')}, or another {setting(key, 'layout')}"
        )


@dataclass
class _Group:
    """Rows that count as the same problem."""

    first: Problem
    answer: str = ""  # of the first that has one
    rows: int = 0
    kept: int = 0
    is_contradicted: bool = False


def _sameness(problem: Problem, duplicates: Duplicates, unique: int) -> object:
    """Equal for problems that count as the same; `unique` for none."""
    if duplicates == "keep":
        return unique
    return identity(problem) if duplicates == "spacing" else (problem.text, problem.choices, problem.history)


def _read(
    settings: ProblemSetConfig, key: str, found: ProblemSet, needs_answers: bool
) -> Iterator[tuple[Problem, str, Layout]]:
    """Every problem of every file with its place and its layout; counts what is read, mended and dropped."""
    for number, path in enumerate(settings.paths, start=1):
        prefix = f"{number}/" if len(settings.paths) > 1 else ""  # ids are those of one file
        name: str = settings.layout
        for row in read_rows(path, settings, key):
            found.read += 1
            if row.number == 1:
                name = _layout_of(settings, row)
                found.layouts.append(name)
            problem = _problem(row, LAYOUTS[name], prefix, settings, key, found, needs_answers)
            if problem is not None:
                yield problem, row.where, LAYOUTS[name]


def _layout_of(settings: ProblemSetConfig, row: Row) -> str:
    if settings.layout != "auto":
        return settings.layout
    found = recognise(row.columns)
    if found == "messages" and "problem" not in settings.fields:
        return found
    return "columns" if settings.fields.keys() & OWN_COLUMNS else found


def _problem(
    row: Row, layout: Layout, prefix: str, settings: ProblemSetConfig, key: str, found: ProblemSet, needs_answers: bool
) -> Problem | None:
    row = row._replace(columns=layout.prepare(row.columns))
    needs = [part for part in layout.needs if part != "answer" or needs_answers]
    draft = read_draft(row, layout.columns_of, settings.fields, key, needs)
    found.mended.update(done for mend in layout.mends if (done := mend(draft)))
    reason = next((reason for refuses in layout.refusals if (reason := refuses(draft))), None)
    if reason is None and draft.lacks_box and needs_answers:
        reason = "no box in the assistant's last message"
    if reason is not None:
        found.dropped[reason] += 1
        return None
    if not draft.problem.strip():
        raise DataError(_emptied(row, "problem"))
    if "answer" in layout.needs and not draft.gold:
        if needs_answers:
            raise DataError(_emptied(row, "answer"))
        found.unanswered += 1
    return draft.finish(prefix, row.number)


def _emptied(row: Row, part: str) -> str:
    return f"{row.where}: `{part}` is empty once what surrounds it is removed; correct or remove the row"
