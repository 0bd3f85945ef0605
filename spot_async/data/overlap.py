"""Finds evaluation problems that are also in a training set, by identical texts or by shared runs of 13 words.

Words are runs of letters and digits, in small letters. A training problem contains an evaluation problem if the texts
are identical except for white space, or if it has at least half of the evaluation problem's 13-word runs. So the count
is a lower bound: rewordings are missed, and a problem of fewer than 13 words is found only where it is identical. Time
is linear in the texts' length.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from spot_async.types import Problem
from spot_async.verification.normalization import same_answer

WORDS_PER_RUN = 13
SHARE = 0.5
_WORD = re.compile(r"[a-z0-9]+")


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
