"""Which problems of an evaluation set also stand in a training set, by runs of 13 words.

Words are runs of letters and digits, in small letters. An evaluation problem counts as contained in a training problem
that holds at least half of its 13-word runs: rewordings and problems of fewer than 13 words are missed, so that what is
found is a lower bound. Linear in the texts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from spot_async.types import Problem
from spot_async.verification.normalization import normalize_answer

WORDS_PER_RUN = 13
SHARE = 0.5
_WORD = re.compile(r"[a-z0-9]+")


class Overlap(NamedTuple):
    """An evaluation problem, and the training problem that holds most of it."""

    evaluation: Problem
    training: Problem
    share: float  # of the evaluation problem's runs, in [0.5, 1]

    @property
    def has_equal_answer(self) -> bool:
        """A copy; where answers differ the two may only share a template."""
        return normalize_answer(self.evaluation.answer) == normalize_answer(self.training.answer)


def runs_of_words(text: str) -> set[int]:
    """A hash for each run of 13 words; none for a shorter text. Equal for equal runs within one process."""
    words = _WORD.findall(text.lower())
    return {hash(tuple(words[i : i + WORDS_PER_RUN])) for i in range(len(words) - WORDS_PER_RUN + 1)}


def find_overlaps(training: Sequence[Problem], evaluation: Sequence[Problem]) -> list[Overlap]:
    """Those of `evaluation` that a problem of `training` contains, in their order."""
    runs = [runs_of_words(problem.text) for problem in evaluation]
    holders = defaultdict(list)  # run -> evaluation problems
    for index, each in enumerate(runs):
        for run in each:
            holders[run].append(index)
    best: dict[int, tuple[int, Problem]] = {}
    for problem in training:
        shared = Counter(index for run in runs_of_words(problem.text) for index in holders.get(run, ()))
        for index, count in shared.items():
            if count > best.get(index, (0, problem))[0]:
                best[index] = count, problem
    return [
        Overlap(evaluation[index], problem, count / len(runs[index]))
        for index, (count, problem) in sorted(best.items())
        if count >= SHARE * len(runs[index])
    ]


def too_short(problems: Sequence[Problem]) -> int:
    """How many have no run of 13 words, so that nothing can be said of them."""
    return sum(not runs_of_words(problem.text) for problem in problems)
