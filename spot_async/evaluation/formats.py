r"""Formats the problems of benchmarks: multiple choice, worked examples, and AlpacaEval's outputs.

Options get letters in an order that depends only on the seed and the options' texts. It does not depend on the file's
order, since copies of one benchmark order options differently, nor on the problem's place. Worked examples come first
in the same message. The answer is asked for in a box, as everywhere; `verification/multiple_choice.py` judges it.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

import msgspec

from spot_async.base.seeds import derive_seed
from spot_async.errors import DataError
from spot_async.types import Problem

QUESTIONS = "The following are multiple choice questions about {category}, with their answers."
# The usual end and start of worked solutions in published sets. They are cut off, since the box says the same.
_CLOSING = re.compile(
    r"\s*(?:so,? |thus,? |therefore,? )?the (?:correct )?answer is:? *\(?[A-Z]\)?\.?\s*$", re.IGNORECASE
)
_OPENING = re.compile(r"^\s*A:\s*")


def order_choices(problem: Problem, seed: int, key: str) -> Problem:
    """Return the problem with its options in seeded order, and the right one's new letter as its answer.

    Raises DataError for a problem without options.
    """
    gold = problem.choices[gold_index(problem, key)]
    choices = sorted(problem.choices)
    random.Random(derive_seed(seed, "choices", *choices)).shuffle(choices)
    return msgspec.structs.replace(problem, choices=tuple(choices), answer=ascii_uppercase[choices.index(gold)])


def gold_index(problem: Problem, key: str) -> int:
    """Return the index of the right option. Raises DataError, naming `key` and the problem, if there is none."""
    if not 2 <= len(problem.choices) <= len(ascii_uppercase):
        raise DataError(
            f"{key}: problem {problem.id!r} has {len(problem.choices)} options; format=multiple_choice needs 2 to 26: "
            "name their column in fields.choices, or choose another format"
        )
    letters = ascii_uppercase[: len(problem.choices)]
    if len(problem.answer) != 1 or problem.answer not in letters:
        raise DataError(
            f"{key}: problem {problem.id!r} has the answer {problem.answer!r}, no letter from A to {letters[-1]}"
        )
    return letters.index(problem.answer)


def with_options(problem: Problem, key: str) -> Problem:
    """Return the problem with its options as lines below the question. Raises DataError if it has no options."""
    gold_index(problem, key)
    return msgspec.structs.replace(problem, text=f"{problem.text.strip()}\n{options_text(problem)}")


def options_text(problem: Problem) -> str:
    return "\n".join(
        f"{letter}. {choice.strip()}" for letter, choice in zip(ascii_uppercase, problem.choices, strict=False)
    )


def worked_example(problem: Problem, key: str) -> str:
    """Return an example: a question in the same form, with solution and answer.

    Its options keep their order, since the solution may name their letters.
    """
    letter = ascii_uppercase[gold_index(problem, key)]
    if not problem.solution:
        raise DataError(f"{key}: example {problem.id!r} has no worked solution: name its column in fields.solution")
    solution = _CLOSING.sub("", _OPENING.sub("", problem.solution)).strip()
    return f"{_question(problem)}\nAnswer: {solution} The answer is \\boxed{{{letter}}}."


class WorkedExamples:
    """The worked examples that stand before questions, by category."""

    def __init__(self, examples: Sequence[Problem], count: int, key: str) -> None:
        """Take the first `count` of each category's `examples`, in their order. `key` is for messages."""
        by_category: Mapping[str | None, list[Problem]] = defaultdict(list)
        for example in examples:
            by_category[example.category].append(example)
        self._texts = {
            category: [worked_example(example, key) for example in found[:count]]
            for category, found in by_category.items()
        }
        self._count, self._key = count, key

    def before(self, problem: Problem) -> Problem:
        """Return the problem with the examples of its category before it. Raises DataError if they are too few."""
        gold_index(problem, self._key)
        texts = self._texts.get(problem.category, [])
        if len(texts) < self._count:
            raise DataError(
                f"{self._key}: {len(texts)} examples of category {problem.category!r}, which problem {problem.id!r} "
                f"has, and {self._count} are asked for"
            )
        head = QUESTIONS.format(category=problem.category or "various subjects")
        return msgspec.structs.replace(problem, text="\n\n".join([head, *texts, _question(problem)]))


def outputs_of(
    problems: Sequence[Problem], responses: Sequence[str], *, generator: str, dataset: str
) -> list[dict[str, str]]:
    """Return the rows of AlpacaEval's outputs file, which its own tool judges. It calls the model `generator`."""
    return [
        {
            "instruction": problem.text,
            "output": response,
            "generator": generator,
            "dataset": problem.category or dataset,
        }
        for problem, response in zip(problems, responses, strict=True)
    ]


def _question(problem: Problem) -> str:
    return f"Question: {problem.text.strip()}\nOptions:\n{options_text(problem)}"
