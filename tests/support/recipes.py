"""Finds the recipes of examples/recipes, and makes policies of them for simulated runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from spot_async.testing.simulation import make_policy

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
SMALL = {"samples": 3, "top_k": 8, "accepted": 8, "prefix_tokens": 8}  # of 64 simulated tokens


def recipe(name: str) -> Any:
    """Return a recipe's class: the one that its configuration names."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = re.search(r"^  kind: \w+:(\w+)$", (RECIPES / f"{name}.yaml").read_text(), flags=re.MULTILINE)
    assert kind is not None
    return getattr(module, kind[1])


def simulated_recipe(name: str) -> Any:
    """Return a recipe's policy for a simulated run."""
    kind = recipe(name)
    return make_policy(kind, **{key: value for key, value in SMALL.items() if key in kind.Settings.model_fields})
