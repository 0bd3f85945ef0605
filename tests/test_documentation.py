"""The documentation is true: generated pages are current, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spot_async.config.loading import load_config
from spot_async.tools import config_docs

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_the_configuration_page_is_current():
    current = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert current == config_docs.page(), "run `make docs` and commit docs/configuration.md"


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_was_left_with_a_blank_to_fill_in(path):
    assert not re.findall(r"^[A-Z]+_[A-Z_]+$|TODO|FIXME|TBD", path.read_text(encoding="utf-8"), flags=re.M)


def test_the_example_of_a_run_on_gpus_is_a_configuration(tmp_path):
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml file=two-gpus.yaml\n(.*?)```", page, flags=re.S)
    path = tmp_path / "two-gpus.yaml"
    path.write_text(example, encoding="utf-8")
    assert load_config(path, []).student.backend.sleep_while_training
    fractions = [
        f"{role}.backend.launch.{key}"
        for role in ("student", "teacher")
        for key in ("memory_fraction=0.3", "devices=0")
    ]
    load_config(path, fractions)


def headings(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
