"""Measures the house: what there is of lines, modules, wide functions, circles, commands, keys and pages.

`python tests/support/house.py` prints it beside the ceilings of `tests/ceilings.toml`, for the tree that it lies in.
With `--lower` it lowers each ceiling to what there is.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from ceilings import read_ceilings

ROOT = Path(__file__).parents[2]
PRODUCT = ("spot_async", "backends", "policies")
SMALL_LINES = 100
WIDE_PARAMETERS = 8
LONG_LINES = 50  # of a function
MEASURED_BESIDE = ("tests", "benchmarks", "experiments")
MODULE_OF = {"backends": "spot_async.backends", "policies": "spot_async.policies"}  # where a folder is installed


def product_files(root: Path = ROOT) -> list[Path]:
    found = [path for top in PRODUCT for path in sorted((root / top).rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def functions(paths: list[Path]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def is_wide(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function has many parameters, `self` left out."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([each for each in given if each.arg not in ("self", "cls")]) >= WIDE_PARAMETERS


def is_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function has many lines, docstring included."""
    return (function.end_lineno or 0) - function.lineno + 1 > LONG_LINES


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    parts[0] = MODULE_OF.get(parts[0], parts[0])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return which modules of the product each one imports outside of functions, those for types included."""
    paths = {module_name(path, root): path for path in product_files(root)}
    return {name: set(_imported(name, path, paths)) - {name} for name, path in paths.items()}


def _imported(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{base}.{alias.name}" in known:
                    yield f"{base}.{alias.name}"
                elif base in known:
                    yield base
        todo += ast.iter_child_nodes(node)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or by others (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def commands() -> list[str]:
    from typer.main import get_command

    from spot_async.cli import app

    group = get_command(app)
    return sorted(name for name, each in group.commands.items() if not each.hidden)  # type: ignore[attr-defined]


def keys(page: Path) -> int:
    """Count the rows of the configuration's page, once for each kind of plug-in that shares their table."""
    found, kinds = 0, 1
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            kinds = max(1, line.count("`kind: "))
        found += kinds * line.startswith("| `")
    return found


def rooms(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of each room, which is a folder of the product."""
    found: Counter[str] = Counter()
    for path in product_files(root):
        found[path.parent.relative_to(root).as_posix()] += lines([path])
    return dict(sorted(found.items()))


def measured(root: Path = ROOT) -> dict[str, int]:
    """Return what is counted besides the lines of the product's rooms."""
    paths = product_files(root)
    modules = [path for path in paths if path.name != "__init__.py"]
    shapes = [(is_long(each), is_wide(each)) for each in functions(paths)]
    pages = sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    return {
        "modules, `__init__` included": len(paths),
        f"modules under {SMALL_LINES} lines, without `__init__`": sum(lines([each]) < SMALL_LINES for each in modules),
        f"functions past {LONG_LINES} lines": sum(long for long, _ in shapes),
        f"functions with {WIDE_PARAMETERS} parameters and more": sum(wide for _, wide in shapes),
        "circles of imports": len(circles(import_graph(root))),
        "commands": len(commands()),
        "configuration keys": keys(root / "docs" / "configuration.md"),
        "pages": len(pages),
        "lines of pages": lines(pages),
        **{f"lines of {name}": lines(sorted((root / name).rglob("*.py"))) for name in MEASURED_BESIDE},
    }


def lower(path: Path, sizes: Mapping[str, int]) -> None:
    """Lower each ceiling of the file that is above what there is. A room that is gone has none."""

    def lowered(line: re.Match[str]) -> str:
        return f'"{line[1]}" = {min(int(line[2]), sizes[line[1]])}\n' if line[1] in sizes else ""

    path.write_text(re.sub(r'^"([^"]+)" = (\d+)\n', lowered, path.read_text(), flags=re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to what there is")
    given = parser.parse_args()
    of_rooms, others = rooms(), measured()
    path = ROOT / "tests" / "ceilings.toml"
    if given.lower:
        lower(path, {**of_rooms, **others})
    found = read_ceilings(path.read_text())
    sys.stdout.write(f"{'room':<56}{'size':>8}{'ceiling':>9}\n")
    for table, ceilings in ((of_rooms, found.rooms), (others, found.others)):
        for name in sorted({*table, *ceilings}):
            sys.stdout.write(f"{name:<56}{table.get(name, 0):>8,}{ceilings.get(name, 0):>9,}\n")
        if table is of_rooms:
            sys.stdout.write(f"{'product':<56}{sum(table.values()):>8,}{sum(ceilings.values()):>9,}\n\n")


if __name__ == "__main__":
    main()
