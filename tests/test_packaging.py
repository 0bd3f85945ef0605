"""The wheel and the sdist hold the whole package, under one name, also from a checkout without links."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = {"backends": "spot_async/backends", "policies": "spot_async/policies"}


def source_modules() -> set[str]:
    """Every module of the tree by the path it must have in a wheel."""
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "spot_async").rglob("*.py")}
    modules = {m for m in modules if not m.startswith(tuple(MAPPED.values()))}
    for folder, package in MAPPED.items():
        modules |= {f"{package}/{p.relative_to(ROOT / folder).as_posix()}" for p in (ROOT / folder).rglob("*.py")}
    return modules


@pytest.mark.parametrize("with_links", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_wheel_built_from_the_sdist_holds_every_module_once(tmp_path, with_links):
    checkout = tmp_path / "checkout"
    shutil.copytree(
        ROOT,
        checkout,
        symlinks=True,
        # not what others write meanwhile, such as caches
        ignore=lambda _, names: [
            n for n in names if n[0] == "." or n in {"runs", "examples", "experiments", "__pycache__"}
        ],
    )
    if not with_links:
        for link in (checkout / "spot_async/backends", checkout / "spot_async/policies"):
            link.unlink()
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", checkout],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if n.endswith(".py")} == source_modules()
    assert "spot_async/py.typed" in names
    for kind in ("html", "yaml"):  # templates, and a table of names
        data = {p.relative_to(ROOT).as_posix() for p in (ROOT / "spot_async").rglob(f"*.{kind}")}
        assert data
        assert data <= set(names)
    assert {n.partition("/")[0].partition("-")[0] for n in names} == {"spot_async"}


def test_plugins_load_under_one_name_only():
    code = (
        "import sys\n"
        "from spot_async.base import registry\n"
        "for group in ('backends', 'policies', 'verifiers'):\n"
        "    for name in registry.names(group): registry.load(group, name)\n"
        "names = set(sys.modules)\n"
        "assert not {n for n in names if n.split('.')[0] in {'backends', 'policies'}}, names\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_the_core_loads_neither_torch_nor_transformers_to_parse_a_command_line():
    code = "import sys, spot_async.cli\nassert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_core_backends_and_policies_import_each_other_downwards_only():
    adapters, methods = MAPPED.values()
    for module in source_modules():
        if module == "spot_async/public.py":  # shows names of all floors
            continue
        above = {root for root in (adapters, methods) if not module.startswith(f"{root}/")}
        assert not above & imported_packages(module), module


def imported_packages(module: str) -> set[str]:
    """What a module imports, as paths in a wheel, each with the packages that it lies in."""
    place = ROOT / module  # through the links
    found: set[Path] = set()
    for node in ast.walk(ast.parse(place.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {Path(*alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = Path(module).parents[node.level - 1] if node.level else Path()
            package = start / Path(*(node.module or "").split("."))
            found |= {package / alias.name for alias in node.names}
    return {folder.as_posix() for path in found for folder in (path, *path.parents)}
