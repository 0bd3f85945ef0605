"""Real servers keep the contract: every check of `spot-async conformance`, and what each is known not to offer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import StartServer, TinyModels
from server_process import RunningServer

from spot_async.config import ModelConfig
from spot_async.config.loading import validate_as
from spot_async.tools.conformance.running import check_backend

# (backend, role, the fixture of its server) and what it does not offer.
CASES = {
    "vllm": ("vllm", "student", "vllm_student", set()),
    "vllm_v2": ("vllm", "student", "short_vllm_v2", set()),
    "vllm as teacher": ("vllm", "teacher", "vllm_student", {"refused_snapshot", "weight_update", "update_under_way"}),
    "openai": (
        "openai",
        "teacher",
        "vllm_student",
        {
            *("position_scores", "candidates", "candidate_temperature", "candidate_version", "abort"),
            *("refused_snapshot", "weight_update", "update_under_way"),
        },
    ),
    "sglang": ("sglang", "student", "sglang_student", {"seeds"}),
}


@pytest.fixture
def short_vllm_v2(start_vllm_v2: StartServer, models: TinyModels) -> Iterator[RunningServer]:
    """With a short context, because the longest responses would take minutes in Triton's interpreter."""
    with start_vllm_v2(models.student, "--max-model-len", "256") as server:
        yield server


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "vllm_v2" else name for name in CASES]
)
async def test_a_real_server_keeps_the_contract(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    kind, role, fixture, not_offered = CASES[name]
    server = request.getfixturevalue(fixture)
    config = validate_as(ModelConfig, {"model": str(server.model), "backend": {"kind": kind, "url": server.url}})
    outcomes = await check_backend(config, tmp_path, role=role)
    broken = [f"{each.name}: {each.note}" for each in outcomes if each.status in ("failed", "not checked")]
    assert not broken, "\n".join(broken)
    assert {outcome.name for outcome in outcomes if outcome.status == "not offered"} == not_offered
    assert max(outcome.nats or 0.0 for outcome in outcomes) <= 5e-5  # at a lower temperature they are divided by it
