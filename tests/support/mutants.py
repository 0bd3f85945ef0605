"""Small faults in the product, and whether its tests notice them.

    python tests/support/mutants.py draw    # tests/mutants.csv again, of this tree
    python tests/support/mutants.py run     # .mutants/outcomes.csv: a line for each mutant of the list; it continues

`make mutants` does the second, after the tests that say which lines each of them reaches. cosmic-ray makes the mutants.
One is named by file, definition, operator and which of the operator's places in that definition it is, so one list
serves before and after changes elsewhere. The tests that reach its definition run until one fails, the quick ones
first. Lines of processes that a test starts are not seen.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import queue
import random
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutants.csv"
OUTCOMES = ROOT / ".mutants" / "outcomes.csv"
REACHED, DURATIONS = OUTCOMES.with_name("coverage"), OUTCOMES.with_name("durations.xml")  # `make mutants` writes them
FOLDERS = ("policies", "spot_async/loop", "spot_async/stages", "spot_async/replicas", "spot_async/verification")
MODULES = tuple(f"spot_async/trainer/{name}.py" for name in ("batching", "loss", "divergence"))
MUTANTS, SEED = 400, 0
TESTS_S = 60.0  # tests that take longer together do not all run
PATIENCE_S = 240.0  # tests that take longer hang
ANNOTATIONS = {"annassign", "tfpdef"}  # never evaluated


class Mutant(NamedTuple):
    file: str
    definition: str  # the qualified name of the outermost function
    operator: str
    place: int  # among the operator's places in the definition


class Found(NamedTuple):
    mutant: Mutant
    occurrence: int  # among the operator's places in the file
    position: tuple[int, int]  # line and column
    body: range  # the definition's lines, without its head


def mutants_of(file: str) -> Iterator[Found]:
    """Yield all mutants of a file."""
    nodes = list(ast_nodes(get_ast((ROOT / file).read_text(encoding="utf-8"))))
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments() or name.endswith("/NoOp"):
            continue
        operator, occurrence, places = operator_class(), 0, defaultdict[str, int](int)
        for node in nodes:
            for position, _ in operator.mutation_positions(node):
                function = function_of(node)
                if function is not None:
                    definition, body = function
                    yield Found(Mutant(file, definition, name, places[definition]), occurrence, position, body)
                    places[definition] += 1
                occurrence += 1


def function_of(node: Any) -> tuple[str, range] | None:
    """Return the outermost function in whose body a node is, with the body's lines; None for other nodes."""
    names: list[str] = []
    body = None
    while (parent := node.parent) is not None:
        if parent.type in ANNOTATIONS:
            return None
        if parent.type == "funcdef":
            body, names = None, [parent.name.value]
            if node is parent.children[-1]:
                body = range(node.get_first_leaf().get_next_leaf().start_pos[0], node.end_pos[0] + 1)
        elif parent.type == "classdef":
            names.append(parent.name.value)
        node = parent
    return None if body is None else (".".join(reversed(names)), body)


def draw() -> None:
    """Write the list: places drawn by the seed, and one mutant of each."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    at = defaultdict[tuple[str, tuple[int, int]], list[Mutant]](list)
    for file in (*(str(path.relative_to(ROOT)) for path in paths), *MODULES):
        for found in mutants_of(file):
            at[file, found.position].append(found.mutant)
    generator = random.Random(SEED)
    drawn = sorted(generator.choice(at[place]) for place in generator.sample(sorted(at), MUTANTS))
    with LIST.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Mutant._fields, *drawn])


def read_list() -> list[Mutant]:
    with LIST.open(newline="") as file:
        return [Mutant(**{**row, "place": int(row["place"])}) for row in csv.DictReader(file)]


def durations() -> Mapping[str, float]:
    """Return the seconds of each test that passed, by its name on pytest's command line."""
    cases = (case for case in xml.parse(DURATIONS).iter("testcase") if len(case.findall("*")) == 0)
    return {f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in cases}


def tests_of(found: Found, data: coverage.CoverageData, seconds: Mapping[str, float]) -> Sequence[str]:
    """Return the tests that reach a mutant's definition, the quick ones first, up to `TESTS_S`."""
    contexts = data.contexts_by_lineno(str(ROOT / found.mutant.file))
    reaching = {each.partition("|")[0] for line in found.body for each in contexts.get(line, ())}
    left, tests = TESTS_S, []
    for test in sorted(reaching & seconds.keys(), key=lambda test: (seconds[test], test)):
        left -= seconds[test]
        if left >= 0 or not tests:
            tests.append(test)
    return tests


def outcome_of(found: Found, tests: Sequence[str], tree: Path) -> str:
    """Return what the tests say of a mutant in a copy of the tree, which is as before afterwards."""
    if not tests:
        return "untested"
    path = tree / found.mutant.file
    whole = path.read_text(encoding="utf-8")
    mutated = mutate_code(whole, get_operator(found.mutant.operator)(), found.occurrence)
    try:
        compile(mutated, found.mutant.file, "exec")
    except SyntaxError:
        return "no program"
    path.write_text(mutated, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    try:
        ended = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, timeout=PATIENCE_S, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return "killed: hangs"
    finally:
        path.write_text(whole, encoding="utf-8")
    # 2: a file of tests cannot be imported. Any other, such as that of a test that is gone, says nothing of a mutant.
    said = {0: "survived", 1: "killed", 2: "killed"}
    return said.get(ended.returncode, f"unknown: pytest ended with {ended.returncode}")


def run(at_once: int) -> None:
    """Write the outcome of each mutant of the list that has none yet, and how many tests were to find it."""
    done = set()
    if OUTCOMES.exists():
        with OUTCOMES.open(newline="") as file:
            done = {tuple(row[:4]) for row in csv.reader(file)}
    data, seconds = coverage.CoverageData(str(REACHED)), durations()
    data.read()
    known = {found.mutant: found for file in {each.file for each in read_list()} for found in mutants_of(file)}
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    trees: queue.Queue[Path] = queue.Queue()

    def job(mutant: Mutant) -> None:
        found = known.get(mutant)
        tests = () if found is None else tests_of(found, data, seconds)
        tree = trees.get()
        try:
            outcome = "gone" if found is None else outcome_of(found, tests, tree)
        finally:
            trees.put(tree)
        with OUTCOMES.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*mutant, outcome, len(tests)])

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(at_once) as pool:
        for number in range(at_once):
            tree = Path(directory, str(number))
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(tree, filter="data")
            trees.put(tree)
        list(pool.map(job, (each for each in read_list() if tuple(map(str, each)) not in done)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["draw", "run"])
    parser.add_argument("--at-once", type=int, default=2, help="mutants, each in a copy of the tree")
    given = parser.parse_args()
    if given.command == "draw":
        draw()
    else:
        run(given.at_once)


if __name__ == "__main__":
    main()
