"""Loads a problem set as configured: reads rows, mends them, drops duplicates, and counts what it did.

It also finds evaluation problems that are in a training set, by identical texts or by shared runs of 13 words. Words
are runs of letters and digits, in small letters. A training problem contains an evaluation problem if the texts are
identical except for white space, or if it has at least half of the evaluation problem's 13-word runs. So the count is a
lower bound: rewordings are missed, and a problem of fewer than 13 words is found only where it is identical. Time is
linear in the texts' length.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from spot_async.base.text import counted
from spot_async.config import Config, Duplicates, EnvironmentConfig, PluginSettings, ProblemSetConfig
from spot_async.data.golds import gold_doubts
from spot_async.data.keys import about, setting
from spot_async.data.layouts import LAYOUTS, Layout, recognise
from spot_async.data.parts import read_draft
from spot_async.data.rows import Row, read_rows
from spot_async.errors import DataError
from spot_async.types import PolicyNeeds, Problem
from spot_async.verification.normalization import same_answer

OWN_COLUMNS = {"problem", "answer", "choices", "solution"}  # a user who names one of these has a file of their own
WORDS_PER_RUN = 13
SHARE = 0.5  # of an evaluation problem's runs
_WORD = re.compile(r"[a-z0-9]+")


@dataclass
class ProblemSet:
    """The problems of a set in the order of their files, and counts of what was done to the rows."""

    problems: list[Problem] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)  # of each file
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    mended: Counter[str] = field(default_factory=Counter)  # rows by what was done to them
    unanswered: int = 0  # rows without an answer, in a layout that has answers
    doubted: dict[str, tuple[int, str]] = field(default_factory=dict)  # rows that may not be meant so, and the first

    @property
    def layout(self) -> str:
        """The layouts for people. `columns` gets other words, because no setting can ask for it."""
        names = ("auto, by the usual columns" if name == "columns" else name for name in self.layouts)
        return ", ".join(dict.fromkeys(names))

    @property
    def counts(self) -> dict[str, int]:
        """Flat counts for records: `read`, `problems`, and one for each reason to drop and each kind of mending."""
        dropped = {f"dropped: {why}": rows for why, rows in self.dropped.items()}
        mended = {f"mended: {what}": rows for what, rows in self.mended.items()}
        unanswered = {"without an answer": self.unanswered} if self.unanswered else {}
        return {"read": self.read, "problems": len(self.problems), **dropped, **mended, **unanswered}

    def doubts(self, key: str, judge: PluginSettings | None) -> list[str]:
        """Return a line for each thing that may not be meant. `key` is the set's own, `judge` is its verifier."""
        golds = gold_doubts(self.problems, key, judge.kind) if judge is not None and judge.JUDGES_ANSWERS else ()
        rows = [
            f"{about(key)}{what}: {rows} of {counted(self.read, 'row')}, first {place}"
            for what, (rows, place) in self.doubted.items()
        ]
        return [*rows, *golds]


def load_problem_set(
    settings: ProblemSetConfig,
    key: str,
    *,
    needs_answers: bool = True,
    keeps_solutions: bool = False,
    environment: EnvironmentConfig | None = None,
) -> ProblemSet:
    """Read, mend and filter the problems that `key` of the configuration describes.

    A row is dropped, and counted, if its layout says so, if another row with the same text has another answer, or if it
    is a duplicate and the settings or the layout drop those. Without `needs_answers` rows need no answer, except in
    layouts that drop such rows; see also `require_answers`. With `keeps_solutions` worked solutions are read in every
    layout, also those that are only read for their answers otherwise. The columns of an `environment` are kept.

    Raises DataError, naming file and line, for a row that cannot be used for any other reason, for an id that is used
    twice, and when no problem is left.
    """
    found, columns = ProblemSet(), environment.columns if environment else ()
    groups: dict[object, _Group] = {}
    kept: list[tuple[Problem, str, _Group]] = []
    for problem, where, layout in _read(settings, key, found, needs_answers, keeps_solutions, columns):
        duplicates = settings.duplicates or layout.duplicates
        group = groups.setdefault(_sameness(problem, duplicates, len(groups)), _Group(problem))
        group.rows += 1
        if problem.answer and group.answer:  # a row without an answer contradicts no other
            group.is_contradicted |= not same_answer(group.answer, problem.answer)
        group.answer = group.answer or problem.answer
        if group.first is problem or duplicates == "conflicting":
            kept.append((problem, where, group))
            group.kept += 1
    found.dropped["conflicting answers"] = sum(group.rows for group in groups.values() if group.is_contradicted)
    found.dropped["duplicate"] = sum(g.rows - g.kept for g in groups.values() if not g.is_contradicted)
    found.dropped = +found.dropped  # unary plus removes zero counts
    where_of_id: dict[str, str] = {}
    for problem, where, group in kept:
        if group.is_contradicted:
            continue
        if (other := where_of_id.setdefault(problem.id, where)) != where:
            raise DataError(
                f"{about(key)}{where}: id {problem.id!r} was used in {other} already; correct it, name another column "
                f"in {setting(key, 'fields.id')}, or set that to null, which numbers the rows"
            )
        found.problems.append(problem)
    if not found.problems:
        reasons = ", ".join(f"{why} {rows}" for why, rows in found.dropped.items())
        dropped = f", layout {found.layout}: {reasons}" if reasons else ""
        raise DataError(f"{about(key)}{', '.join(settings.paths)}: no problems in {found.read} rows{dropped}")
    return found


def load_training_sets(config: Config, needs: PolicyNeeds) -> dict[str, ProblemSet]:
    """Return the sets of `data.train` by key, their problems marked with the settings. Of several, ids are `2/ID`.

    Raises as `load_problem_set`, and for problems that lack what their verifier or the policy needs.
    """
    own_prompts, sets = [*filter(None, map(config.teacher_prompt, config.teachers_by_role))], {}
    for number, (key, settings) in enumerate(config.data.sets.items(), start=1):
        needs_answers = needs.outcomes and config.verifiers[key].JUDGES_ANSWERS
        keeps_solutions = any(prompt.names_solution for prompt in own_prompts)
        if config.route is not None and config.route.by not in ("category", "tier"):
            settings = settings.model_copy(update={"fields": {**settings.fields, "domain": config.route.by}})
        found = load_problem_set(
            settings,
            key,
            needs_answers=needs_answers,
            keeps_solutions=keeps_solutions,
            environment=config.environments.get(key),
        )
        if needs_answers:
            require_answers(found, key)
        if needs.written_responses:
            require_responses(found, key)
        if hidden := [each for each in found.problems if not all(choice in each.shown for choice in each.choices)]:
            what = "choices that are not in the problem stand in no prompt (write them into it)"
            found.doubted[what] = len(hidden), hidden[0].id
        prefix = f"{number}/" if len(config.data.sets) > 1 else ""
        found.problems = [
            msgspec.structs.replace(
                each,
                id=prefix + each.id,
                category=settings.category or each.category,
                set_key=key,
                instruction=settings.instruction,
            )
            for each in found.problems
        ]
        sets[key] = found
    return sets


def require_answers(found: ProblemSet, key: str) -> None:
    """Raise DataError if a problem has no answer, as in a layout that reads none."""
    if problem := next((each for each in found.problems if not each.answer), None):
        raise DataError(
            f"{about(key)}problem {problem.id!r} has no answer, since layout {found.layout} reads none: name its "
            f"column in {setting(key, 'fields.answer')}, or another {setting(key, 'layout')}"
        )


def require_responses(found: ProblemSet, key: str) -> None:
    """Raise DataError if a problem has no written response, which the policy learns from."""
    if problem := next((each for each in found.problems if not each.response), None):
        raise DataError(
            f"{about(key)}problem {problem.id!r} has no response, and the policy learns from written ones: name their "
            f"column in {setting(key, 'fields.response')}, or correct the row"
        )


@dataclass
class _Group:
    """Rows that count as the same problem."""

    first: Problem
    answer: str = ""  # the answer of the first row that has one
    rows: int = 0
    kept: int = 0
    is_contradicted: bool = False


def _sameness(problem: Problem, duplicates: Duplicates, unique: int) -> object:
    """Return a value that is equal for problems that count as the same, or `unique` where duplicates are kept."""
    if duplicates == "keep":
        return unique
    return identity(problem) if duplicates == "spacing" else (problem.text, problem.choices, problem.history)


def _read(
    settings: ProblemSetConfig,
    key: str,
    found: ProblemSet,
    needs_answers: bool,
    keeps_solutions: bool,
    columns: Sequence[str],
) -> Iterator[tuple[Problem, str, Layout]]:
    """Yield every problem of every file with its place and layout. Counts what is read, mended and dropped."""
    for number, path in enumerate(settings.paths, start=1):
        prefix = f"{number}/" if len(settings.paths) > 1 else ""  # an id may be used in several files
        name: str = settings.layout
        for row in read_rows(path, settings, key):
            found.read += 1
            if row.number == 1:
                name = _layout_of(settings, row)
                found.layouts.append(name)
            layout = LAYOUTS[name].with_solutions() if keeps_solutions else LAYOUTS[name]
            problem = _problem(row, layout, prefix, settings, key, found, needs_answers)
            if problem is not None:
                if lacking := [name for name in columns if name not in row.columns]:
                    raise DataError(f"{row.where}: no column {lacking[0]!r}, which environment.columns names")
                own = {name: row.columns[name] for name in columns}
                yield msgspec.structs.replace(problem, columns=own) if own else problem, row.where, layout


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
    for what, place in draft.doubts.items():
        rows, first = found.doubted.get(what, (0, row.where + place))
        found.doubted[what] = rows + 1, first
    found.mended.update(done for mend in layout.mends if (done := mend(draft)))
    if draft.chat_in_string:
        found.mended["chat messages in a string"] += 1
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


class Overlap(NamedTuple):
    """An evaluation problem, and the training problem that contains most of it."""

    evaluation: Problem
    training: Problem
    share: float  # of the evaluation problem's runs, in [0.5, 1]
    is_identical: bool = False  # except for white space

    @property
    def has_equal_answer(self) -> bool:
        """Whether the answers are equal too. Problems with different answers may only share a template."""
        return same_answer(self.evaluation.answer, self.training.answer)


def runs_of_words(text: str) -> set[int]:
    """Return a hash for each run of 13 words; none for a shorter text. Hashes compare only within one process."""
    words = _WORD.findall(text.lower())
    return {hash(tuple(words[i : i + WORDS_PER_RUN])) for i in range(len(words) - WORDS_PER_RUN + 1)}


def identity(problem: Problem, *, with_system: bool = True) -> object:
    """Return a value that is equal for problems with the same text, choices and history, except for white space."""
    turns = [(each.role, " ".join(each.content.split())) for each in problem.history]
    said = tuple(turn for turn in turns if with_system or turn[0] != "system")
    return " ".join(problem.text.split()), problem.choices, said


def count_identical(training: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """Count the problems of `evaluation`, of any length, that are also in `training`."""
    trained = {_question(problem) for problem in training}
    return sum(_question(problem) in trained for problem in evaluation)


def _question(problem: Problem) -> object:
    # A system message is no part of the question: whoever knows the answer knows it under any.
    return identity(problem, with_system=False)


def find_overlaps(training: Sequence[Problem], evaluation: Sequence[Problem]) -> list[Overlap]:
    """Return the problems of `evaluation` that a problem of `training` contains, in their order."""
    runs = [runs_of_words(problem.text) for problem in evaluation]
    holders = defaultdict(list)  # run -> evaluation problems
    for index, each in enumerate(runs):
        for run in each:
            holders[run].append(index)
    best: dict[int, tuple[int, Problem]] = {}
    twins: dict[object, Problem] = {}
    for problem in training:
        twins.setdefault(_question(problem), problem)
        shared = Counter(index for run in runs_of_words(problem.text) for index in holders.get(run, ()))
        for index, count in shared.items():
            if count > best.get(index, (0, problem))[0]:
                best[index] = count, problem
    found = {
        index: Overlap(evaluation[index], problem, count / len(runs[index]))
        for index, (count, problem) in best.items()
        if count >= SHARE * len(runs[index])
    }
    for index, problem in enumerate(evaluation):
        if (twin := twins.get(_question(problem))) is not None:
            found[index] = Overlap(problem, twin, 1.0, is_identical=True)
    return [found[index] for index in sorted(found)]


def too_short(problems: Sequence[Problem]) -> int:
    """Count the problems with fewer than 13 words, which are found only where they are identical."""
    return sum(not runs_of_words(problem.text) for problem in problems)
