"""The recipes are short, name only what is public, and stand in their table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recipes import RECIPES

from spot_async.checks.plan import plan_training
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError

FILES = sorted(RECIPES.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_short_public_and_says_the_papers_line(path: Path) -> None:
    text = path.read_text()
    assert 10 <= len(text.splitlines()) <= 40
    assert set(re.findall(r"^(?:from|import) (spot_async\S*)", text, flags=re.M)) == {
        "spot_async",
        "spot_async.protocols",
    }
    head = text.split('"""')[1].splitlines()
    assert {line.split(":")[0] for line in head if re.match(r"\w+: ", line)} in ({"paper", "ours"}, {"verl", "ours"})


def test_the_table_has_every_recipe_and_each_has_a_configuration_for_its_class() -> None:
    table = re.findall(r"\| \[(\w+)\.py\]\((\w+)\.py\) \|", (RECIPES / "README.md").read_text())
    assert sorted(table) == [(path.stem, path.stem) for path in FILES]
    for path in FILES:
        kind = re.search(r"^  kind: (\w+):(\w+)$", path.with_suffix(".yaml").read_text(), flags=re.M)
        assert kind is not None
        assert kind[1] == path.stem
        assert re.search(rf"^class {kind[2]}:$", path.read_text(), flags=re.M)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("rlsd", "prompt.teacher=null", "prompt.teacher.text: RLSD compares two contexts"),
        (
            "sdft",
            "data.train.fields={}",
            "has no solution to show; give data.train.fields.solution",
        ),
    ],
)
def test_a_recipe_without_its_context_is_refused(
    name: str, given: str, said: str, few_problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(RECIPES.parents[1])
    problems = f"data.train.path={few_problems}" if name == "sdft" else f"data.train={few_problems}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan_training(load_config(RECIPES / f"{name}.yaml", [problems, given]))
