"""The documentation is true: generated pages are current, links lead somewhere, keys and commands exist."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import generated_docs
import pytest
import typer
import yaml

from spot_async.base import registry
from spot_async.cli import app
from spot_async.config import Config
from spot_async.config.loading import validate
from spot_async.policies.distill import DistillSettings
from spot_async.protocols import PromptStages
from spot_async.testing.conformance import test_generation, test_scoring, test_service, test_weights
from spot_async.testing.conformance.contract import CHECKS

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "experiments", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md"))])


def blocks(page: Path, language: str) -> list[str]:
    """Return the page's code blocks in a language, those that name a file left out; `""` stands for no language."""
    fenced = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [block for named, block in fenced if named == language]


def configuration_examples() -> list[Any]:
    """Return each YAML block that has nothing but sections of a configuration, called by its page."""
    found = []
    for path in PAGES:
        for number, block in enumerate(blocks(path, "yaml")):
            tree = yaml.safe_load(textwrap.dedent(block))
            if isinstance(tree, dict) and set(tree) <= set(Config.model_fields):
                found.append(pytest.param(tree, id=f"{path.relative_to(ROOT).as_posix()}-{number}"))
    return found


def test_the_configuration_page_is_current():
    current = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert current == generated_docs.page(), "run `make docs` and commit docs/configuration.md"
    coming_from = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert coming_from == generated_docs.coming_from(), "run `make docs` and commit docs/coming-from.md"


def test_the_library_page_lists_all_that_a_policy_awaits():
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    missing = [name for name in vars(PromptStages) if not name.startswith("_") and f"`{name}(" not in page]
    assert [name for name in missing if f"`stages.{name}" not in page] == []


def test_the_methods_page_lists_the_keys_of_distill_with_their_defaults() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Distillation by keys\n(.*?)^## ", page, flags=re.M | re.S)
    listed = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section, flags=re.M))
    fields = DistillSettings.model_fields.items()
    assert listed == {name: yaml.safe_dump(field.default).split("\n")[0] for name, field in fields if name != "kind"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in headings(page), f"{target}: no such heading"


def test_pages_that_code_and_configurations_name_are_there():
    """In comments, in errors and in the heads of files: each names a page by its path from the root."""
    folders = (
        "spot_async",
        "backends",
        "policies",
        "benchmarks",
        "configs",
        "examples",
        "experiments",
        "deploy",
        "tests",
    )
    files = [path for each in folders for end in ("py", "yaml") for path in (ROOT / each).rglob(f"*.{end}")]
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in files
        for page in re.findall(r"\bdocs/[\w/.-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert not [each for each in sorted(named) if not (ROOT / each[1]).exists()]


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            targets = re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8"))
            todo += [(page.parent / target).resolve() for target in targets]
    moved = {page for page in PAGES if re.fullmatch(r"Moved to \[[^\n]+\)\.\n", page.read_text(encoding="utf-8"))}
    assert not [page for page in PAGES if page not in reached | moved]


def test_each_kind_of_server_is_described():
    page = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    for kind in registry.names("backends"):
        assert f"| [`{kind}`](" in page  # and the link leads somewhere


def test_the_checks_on_the_page_are_in_the_contract():
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    shown = re.findall(r"^(\w+) +(?:passed|skipped) ", page, flags=re.M)
    assert all((test_generation, test_scoring, test_service, test_weights))  # they define the checks
    assert shown
    assert set(shown) <= set(CHECKS)


def defined_in(path: Path) -> set[str]:
    """Return the names of a file's functions and classes, methods also as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            found |= methods | {f"{node.name}.{method}" for method in methods}
    return found


def test_the_names_on_the_tour_are_in_their_files():
    page = ROOT / "docs" / "tour.md"
    names = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", page.read_text(encoding="utf-8"))
    assert len(names) > 40
    missing = [(name, file) for name, file in names if Path(file).name != name]
    missing = [(name, file) for name, file in missing if name not in defined_in((page.parent / file).resolve())]
    assert not missing, "docs/tour.md names these, and the files do not have them (any more)"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_in_examples_exist(path):
    commands = set(typer.main.get_command(app).commands)
    for block in [*blocks(path, ""), *blocks(path, "bash")]:
        for command in re.findall(r"^(?:\$ )?spot-async ([a-z-]+)", block, flags=re.M):
            assert command in commands, command


@pytest.mark.parametrize("example", configuration_examples())
def test_keys_in_examples_exist(example):
    required = {"data": {"train": "problems.jsonl"}, "policy": "spot", "training": {"epochs": 1}}
    roles = ("student",) if "teachers" in example else ("student", "teacher")
    models = {role: {"model": "models/some"} | (example.get(role) or {}) for role in roles}
    validate(required | example | models)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_was_left_with_a_blank_to_fill_in(path):
    assert not re.findall(r"^[A-Z]+_[A-Z_]+$|TODO|FIXME|TBD", path.read_text(encoding="utf-8"), flags=re.M)


def headings(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
