"""Real servers keep the contract: every check of it, and what each is known not to offer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import StartServer, TinyModels
from contract_run import run_contract
from server_process import RunningServer

# (backend, role, the fixture of its server) and what it does not offer.
CASES = {
    "vllm": ("vllm", "student", "vllm_student", {"score_tail"}),
    "vllm_v2": ("vllm", "student", "short_vllm_v2", {"score_tail"}),
    "vllm as teacher": (
        "vllm",
        "teacher",
        "vllm_student",
        {"score_tail", "refused_snapshot", "weight_update", "update_under_way"},
    ),
    "openai": (
        "openai",
        "teacher",
        "vllm_student",
        {
            *("score_tail", "position_scores", "candidates", "candidate_temperature", "candidate_version", "abort"),
            *("refused_snapshot", "weight_update", "update_under_way", "seeds"),
        },
    ),
    "sglang": ("sglang", "student", "sglang_student", {"score_tail", "seeds"}),
}


@pytest.fixture
def short_vllm_v2(start_vllm_v2: StartServer, models: TinyModels) -> Iterator[RunningServer]:
    """With a short context, because the longest responses would take minutes in Triton's interpreter."""
    with start_vllm_v2(models.student, "--max-model-len", "256") as server:
        yield server


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "vllm_v2" else name for name in CASES]
)
def test_a_real_server_keeps_the_contract(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    kind, role, fixture, not_offered = CASES[name]
    server = request.getfixturevalue(fixture)
    attached = ["--backend", kind, "--url", server.url, "--model", str(server.model), "--directory", str(tmp_path)]
    _, found = run_contract(*attached, "--role", role)
    broken = [f"{each}: {said}" for each, (state, said, _) in found.items() if state == "failed"]
    assert not broken, "\n".join(broken)
    skipped = {each: said for each, (state, said, _) in found.items() if state == "skipped"}
    assert skipped.keys() == not_offered
    assert all(said.startswith("not offered: ") for said in skipped.values())
    assert max(nats for _, _, nats in found.values()) <= 5e-5  # at a lower temperature they are divided by it
