"""What a run's parts are given of its configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spot_async.config.loading import load_config
from spot_async.run_directory.manifest import Manifest
from spot_async.running.resuming import Beginning
from spot_async.running.run_trainer import trainer_settings
from spot_async.types import PolicyNeeds

ROOT = Path(__file__).parents[2]
FIRST = Beginning(Manifest(step=0, lineages=(0,), keys="", data=""))


def test_the_trainer_is_given_what_staleness_asks_of_it(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [])
    plan: Any = SimpleNamespace(
        policy=SimpleNamespace(needs=PolicyNeeds()),
        schedule=SimpleNamespace(iterations=3),
        stop_token_ids=(),
        served={},
    )
    directory: Any = SimpleNamespace(path=tmp_path, weights=SimpleNamespace(published=tmp_path / "weights"))
    strict = trainer_settings(config, plan, directory, FIRST)
    assert strict.training == config.training.model_copy(update={"behavior": "served"})
    assert not strict.publishes_beside
    stale = trainer_settings(config.model_copy(update={"max_staleness": 1}), plan, directory, FIRST)
    assert (stale.training.behavior, stale.training.importance_cap) == ("recomputed", 2.0)
    assert stale.publishes_beside
    sharded = load_config(ROOT / "configs" / "quickstart.yaml", ["training.sharding=fsdp2", "max_staleness=1"])
    assert not trainer_settings(sharded, plan, directory, FIRST).publishes_beside
