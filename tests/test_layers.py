"""Imports go down only: no room imports from a floor above it, or starts a program of one (docs/tour.md)."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (  # from the top
    "cli",
    "tools",
    "running",
    "checks",
    "telemetry",
    "watchdog",
    "loop",
    "evaluation",
    "run_directory",
    "stages",
    "replicas",
    "protocols",
    "spending",
    "data",
    "terms",
    "models",
    "types",
    "config",
    "base",
    "errors",
)
GROUND = {"models", "terms", "types", "config", "base", "errors"}
BESIDE = {  # rooms next to the floors, and what each may import
    "environments": GROUND | {"protocols"},
    "verification": GROUND,
    "trainer": GROUND,
    "serving": GROUND,
    "testing": GROUND | {"protocols", "stages", "loop", "trainer"},
    "policies": GROUND | {"protocols"},
    "backends": GROUND | {"protocols", "spending", "serving"},
}
STARTED = {
    ("spot_async/telemetry/prometheus.py", "cli"),  # at `/` of a run's metrics its report is made by the command
    ("spot_async/testing/conformance/plugin.py", "running"),  # starts the backend that it checks
}
SIMULATING = {"tools": {"testing"}, "running": {"testing"}}  # `simulate` and the rehearsal are on virtual time
OURS = re.compile(r"spot_async(\.\w+)+")
FACADES = {"__init__", "__main__", "public"}  # the package's own: what it shows, and its command


@functools.cache
def modules() -> list[tuple[str, Path]]:
    """Return every module of the tree with its room."""
    found = []
    for top in ("spot_async", "backends", "policies"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if top == "spot_async":
                parts = parts[1:]
            if parts[0] not in FACADES and not (top == "spot_async" and parts[0] in {"backends", "policies"}):
                found.append((parts[0], path))
    return found


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a module imports when it runs, inside functions too. Types alone do not count.

    A module that is named in a text is imported or started as a program. `-m spot_async` starts the command.
    """
    rooms: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
            names = [node.value]
        elif isinstance(node, ast.List | ast.Tuple):
            words = {each.value for each in node.elts if isinstance(each, ast.Constant)}
            names = ["spot_async.cli"] if {"-m", "spot_async"} <= words else []
        rooms |= {name.split(".")[1] for name in names if name.startswith("spot_async.")}
        todo += ast.iter_child_nodes(node)
    return rooms


def callers(*names: str) -> set[str]:
    """Return the modules that call a function or class by one of these names."""
    texts = {path: path.read_text() for _, path in modules()}
    return {
        path.relative_to(ROOT).as_posix()
        for path, text in texts.items()
        if any(name in text for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    }


def test_servers_are_opened_in_one_place_only() -> None:
    # Simulated servers are none.
    simulated = {"spot_async/tools/simulate/simulation.py"}
    assert callers("ReplicaPool", "backend_factories") - simulated == {"spot_async/running/services.py"}


def test_every_room_has_a_floor_or_stands_beside_them() -> None:
    assert {room for room, _ in modules()} == {*FLOORS, *BESIDE}


@pytest.mark.parametrize("room", [*FLOORS, *BESIDE])
def test_a_room_imports_only_from_below(room: str) -> None:
    unseen = {"backends", "policies"} | ({"testing"} - SIMULATING.get(room, set()))
    allowed = BESIDE[room] if room in BESIDE else {*FLOORS[FLOORS.index(room) :], *BESIDE} - unseen
    upwards = {
        (path.relative_to(ROOT).as_posix(), other)
        for own, path in modules()
        if own == room
        for other in imported_rooms(path)
        if other != room and other in {*FLOORS, *BESIDE} and other not in allowed
    }
    assert not upwards - STARTED
