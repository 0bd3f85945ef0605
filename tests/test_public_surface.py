"""What others build on stays: names, keys, metrics and files, as they were before the tree was redrawn.

`recorded/public_surface.json` is that list. What is added need not stand in it; what is taken away on purpose leaves
it in the same commit, with a line in the changelog.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from generated_docs import every_key

import spot_async

ROOT = Path(__file__).parents[1]
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "public_surface.json").read_text())
NAMES = (  # that do not stand in `spot_async.__all__`
    "spot_async.policies.acquisition:score_positions",
    "spot_async.policies.acquisition:select_positions",
    "spot_async.models.entropy:entropy_bounds",
    "spot_async.policies.targets:calibrated_target",
    "spot_async.trainer.loss:clipped_policy_loss",
    "spot_async.trainer.divergence:soft_target_loss",
    "spot_async.evaluation.metrics:avg_at_k_per_problem",
    "spot_async.evaluation.metrics:pass_at_k_per_problem",
    "spot_async.verification:extract_boxed",
    "spot_async.verification:Verdict",
)


def first_cells(page: str) -> set[str]:
    """Return the names in the first column of a page's tables, each behind its section, or each that shares it."""
    found, sections = set(), [""]
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("#"):
            sections = line.lstrip("# ").replace("`", "").split(" and ")
        if match := re.match(r"\| `([^`]+)` \|", line):
            found |= {f"{section}: {match[1]}" for section in sections}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_public_functions_are_where_they_are_documented(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_the_package_still_shows_its_names() -> None:
    assert set(RECORDED["names of spot_async"]) <= set(spot_async.__all__)
    assert all(getattr(spot_async, name) is not None for name in RECORDED["names of spot_async"])


def test_plug_ins_keep_their_names() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, names in RECORDED["entry points"].items():
        assert set(names) <= set(groups[group])


def test_no_key_of_the_configuration_is_lost() -> None:
    assert set(RECORDED["configuration keys"]) <= {f"{kind}: {key}" if kind else key for kind, key in every_key()}


def test_no_metric_is_lost() -> None:  # the page is what a run writes: test_metrics_page.py
    assert set(RECORDED["metrics"]) <= {cell.partition(": ")[2] for cell in first_cells("metrics.md")}


def test_no_file_of_a_run_directory_is_lost() -> None:  # the table is what a run leaves: test_train.py
    page = (ROOT / "docs" / "running.md").read_text()
    assert not [file for file in RECORDED["files of a run directory"] if f"`{file}`" not in page]
