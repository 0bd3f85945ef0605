"""What a run's parts are given of its configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spot_async.config.loading import load_config
from spot_async.running.assembly import trainer_settings
from spot_async.types import PolicyNeeds

ROOT = Path(__file__).parents[2]


def test_the_trainer_is_given_what_staleness_asks_of_it(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [])
    plan: Any = SimpleNamespace(
        policy=SimpleNamespace(needs=PolicyNeeds()), schedule=SimpleNamespace(iterations=3), stop_token_ids=()
    )
    directory: Any = SimpleNamespace(path=tmp_path)
    strict = trainer_settings(config, plan, directory).training
    assert strict == config.training.model_copy(update={"behavior": "served"})
    stale = trainer_settings(config.model_copy(update={"max_staleness": 1}), plan, directory).training
    assert (stale.behavior, stale.importance_cap) == ("recomputed", 2.0)
