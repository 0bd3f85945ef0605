"""`spot-async check` on real servers: what it finds is what is known of them, and an unsafe run is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spot_async.checks.diagnosis import Diagnosis
from spot_async.checks.plan import plan_training
from spot_async.config.loading import load_config
from spot_async.tools.check.servers import examine

BOTH = {"weight_update": True, "weight_transport": "disk", "vocab_as_students": True}
KNOWN: dict[str, dict[str, Any]] = {
    "vllm": BOTH | {"score_temperature_probed": "one", "generation_temperature_probed": "one", "seeds_probed": True},
    "sglang": BOTH | {"score_temperature_probed": "one", "generation_temperature_probed": "request"},
}


def examined(tmp_path: Path, models: Any, student: dict[str, str], *overrides: str) -> Diagnosis:
    """A run with this student and a local teacher."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"problem": f"one half of {i}", "answer": "1"}) for i in range(16)))
    tree = {
        "student": {"model": str(models.student), "backend": student},
        "teacher": {"model": str(models.teacher)},
        "data": {"train": str(problems)},
        "policy": {"kind": "opd"},
        "sampling": {"max_prompt_tokens": 128, "max_response_tokens": 64},
        "training": {"iterations": 1, "batch_size": 8, "mini_batch_size": 8},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "config.yaml", overrides)
    return asyncio.run(examine(config, plan_training(config), tmp_path))


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_found_of_a_real_server_is_what_is_known_of_it(
    kind: str, models: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue(f"{kind}_student")
    found = examined(tmp_path, models, {"kind": kind, "url": server.url})
    facts = found.roles["student"]
    assert found.refusals == []
    assert {name: facts[name] for name in KNOWN[kind]} == KNOWN[kind]
    assert facts["server"].startswith(kind)
    assert facts["noise_together_nats"] < 1e-4
    assert facts["disagreement_nats"] < 1e-4
    assert 0 < facts["round_trip_s"] < 5
    assert facts["version"] is None  # until the run's first weights are sent
    if facts["score_temperature_probed"] == "one" == facts["generation_temperature_probed"]:
        unsafe = examined(tmp_path, models, {"kind": kind, "url": server.url}, "sampling.temperature=0.7")
        assert any("sampling.temperature=0.7" in line for line in unsafe.refusals)
