r"""Draws problems of the relay and worked solutions in a chosen style.

A problem is a start state and two, three or four different operations, such as `7caf`: apply c to 7, then a, then f.
Each operation is a fixed random permutation of the ten states. A solution handles the operations one by one. For each
it names one of four methods, then three states, then a connective:

    cW315SaZ482SfX227T\boxed{527}

Operation c by method W goes from 7 over 3 and 1 to 5. Every method leads to the same last state, over other states of
its own. So all methods are right, and each needs other *facts* to be known: 1,440 in all. Which method to name is the
*decision*. The connective (S, T or N) is as uncertain and decides nothing, so it is a control. The answer is the state
after every operation: one state alone could be guessed.

This module draws and reads only. It knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

OPERATIONS = "abcdefghijkl"
METHODS = "WXYZ"
CONNECTIVES = "STN"
CONNECTIVE_WEIGHTS = (0.5, 0.3, 0.2)
STAGES = 3  # states that a method writes
STEP_LETTERS = 6  # of an operation, a method, three states and a connective
STATES = 10
SEED = 20261123
TIERS = (2, 3, 4)  # operations of a problem
TEACHER_PRIOR = (0.6, 0.25, 0.1, 0.05)  # of an operation's methods, in an order of its own
KNOWN_SHARES = (0.85, 0.6, 0.4, 0.2)  # of the facts of an operation's methods that the student knows, in another order
HELDOUT_PER_TIER = 400
TRAIN_PER_TIER = {2: 840, 3: 1500, 4: 1500}  # there are 1,320 different problems of two operations

Array = np.ndarray


@dataclass(frozen=True)
class Relay:
    """The tables of a relay: facts, the teacher's priors, and what the student knows. All follow from the seed."""

    seed: int

    @cached_property
    def _drawn(self) -> tuple[Array, Array, Array, Array, Array]:
        random = np.random.default_rng(self.seed)
        methods, operations = len(METHODS), len(OPERATIONS)
        result = np.stack([random.permutation(STATES) for _ in range(operations)])
        facts = np.zeros((STAGES, methods, operations, STATES), np.int64)
        for method in range(methods):
            for operation in range(operations):
                first, second = random.permutation(STATES), random.permutation(STATES)
                facts[0, method, operation] = first
                facts[1, method, operation] = second
                facts[2, method, operation, second[first]] = result[operation]
        known, prior = np.zeros((operations, methods)), np.zeros((operations, methods))
        for operation in range(operations):
            best_first = random.permutation(methods)
            known[operation, best_first] = KNOWN_SHARES
            # The student's best method has each of the teacher's ranks in as many operations.
            others, rank = random.permutation(best_first[1:]), operation % methods
            prior[operation, np.concatenate([others[:rank], best_first[:1], others[rank:]])] = TEACHER_PRIOR
        is_known = random.random(facts.shape) < known.T[None, :, :, None]
        return result, facts, prior, known, is_known

    @property
    def result(self) -> Array:
        """The state after each operation on each state, (operations, states)."""
        return self._drawn[0]

    @property
    def facts(self) -> Array:
        """The next state by stage, method, operation and state."""
        return self._drawn[1]

    @property
    def prior(self) -> Array:
        """The teacher's chances of naming each method, (operations, methods)."""
        return self._drawn[2]

    @property
    def known_share(self) -> Array:
        """The share of facts that the student knows, (operations, methods)."""
        return self._drawn[3]

    @property
    def is_known(self) -> Array:
        """Which facts the student knows, indexed as `facts`."""
        return self._drawn[4]

    def problems(self, random: np.random.Generator, count: int, operations: int) -> tuple[Array, Array]:
        """Draw start states (n,) and different operations (n, operations)."""
        starts = random.integers(0, STATES, count)
        order = np.argsort(random.random((count, len(OPERATIONS))), axis=1)
        return starts, order[:, :operations]

    def trace(self, start: int, operations: Array) -> list[int]:
        """Return the state after each operation."""
        states = []
        for operation in operations:
            start = int(self.result[operation, start])
            states.append(start)
        return states

    @cached_property
    def heldout(self) -> dict[str, tuple[int, str]]:
        """The evaluation set: problem texts with their number of operations and their answers."""
        return self._different(np.random.default_rng((self.seed, 1)), dict.fromkeys(TIERS, HELDOUT_PER_TIER), {})

    @cached_property
    def train(self) -> dict[str, tuple[int, str]]:
        """The prompts for distillation, all different and none held out."""
        return self._different(np.random.default_rng((self.seed, 2)), TRAIN_PER_TIER, self.heldout)

    def _different(
        self, random: np.random.Generator, wanted: dict[int, int], excluded: dict[str, tuple[int, str]]
    ) -> dict[str, tuple[int, str]]:
        found: dict[str, tuple[int, str]] = {}
        for operations, count in wanted.items():
            most = len(found) + count
            while len(found) < most:
                (start,), (row,) = self.problems(random, 1, operations)
                text = problem_text(int(start), row)
                if text not in excluded:
                    found.setdefault(text, (operations, states_text(self.trace(int(start), row))))
        return found


RELAY = Relay(SEED)


@dataclass(frozen=True)
class Solutions:
    """Worked solutions of problems with equally many operations, as indexes."""

    methods: Array  # (n, operations)
    states: Array  # (n, operations, STAGES) as they are written
    connectives: Array  # (n, operations)
    is_slip: Array  # (n, operations, STAGES) whether the state is a slip, which nobody is to learn


def write_solutions(
    relay: Relay, starts: Array, operations: Array, prior: Array, random: np.random.Generator, *, is_known: Array,
    slips: float = 0.0, reads_answers: bool = False,
) -> Solutions:  # fmt: skip
    """Write solutions whose methods follow `prior`. States are random where a fact is not known, or by chance `slips`.

    A solution continues from the state that it wrote, right or wrong. Where it `reads_answers`, it has the last state
    of each operation from the answer.
    """
    count, length = operations.shape
    methods = np.zeros((count, length), np.int64)
    states = np.zeros((count, length, STAGES), np.int64)
    slipped = np.zeros((count, length, STAGES), np.bool_)
    now = right = starts
    for j in range(length):
        operation = operations[:, j]
        right = relay.result[operation, right]
        methods[:, j] = (
            (random.random((count, 1)) > prior[operation].cumsum(axis=1)).sum(axis=1).clip(0, len(METHODS) - 1)
        )
        for stage in range(STAGES):
            fact = stage, methods[:, j], operation, now
            slipped[:, j, stage] = random.random(count) < slips
            follows = is_known[fact] & ~slipped[:, j, stage]
            now = np.where(follows, relay.facts[fact], random.integers(0, STATES, count))
            now = right if reads_answers and stage == STAGES - 1 else now
            states[:, j, stage] = now
    connectives = random.choice(len(CONNECTIVES), (count, length), p=CONNECTIVE_WEIGHTS)
    return Solutions(methods, states, connectives, slipped)


def problem_text(start: int, operations: Array) -> str:
    return states_text([start]) + "".join(OPERATIONS[operation] for operation in operations)


def states_text(states: list[int]) -> str:
    return "".join(str(state) for state in states)


def read_steps(problem: str, response: str) -> Iterator[tuple[int, int]]:
    """Yield operation and method of each step of a response that is written as in a solution."""
    for j, letter in enumerate(problem[1:]):
        step = response[STEP_LETTERS * j :][:STEP_LETTERS]
        if len(step) == STEP_LETTERS and step[0] == letter and step[1] in METHODS:
            yield OPERATIONS.index(letter), METHODS.index(step[1])
