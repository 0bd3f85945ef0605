"""A whole run on servers that show only truncated distributions chooses what a run on whole ones chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from problem_files import FEW, FOUR

import spot_async

pytestmark = pytest.mark.usefixtures("servers_on_threads", "trainer_on_thread")
ROOT = Path(__file__).parents[2]

TRUNCATED = """
import msgspec
import numpy as np

from spot_async import ScoredPositions
from spot_async.backends.local import LocalBackend
from spot_async.models.entropy import entropy_bounds


class Truncated(LocalBackend):
    class Settings(LocalBackend.Settings):
        kind: str = "truncated_servers:Truncated"

    async def capabilities(self, *, deadline):
        found = await super().capabilities(deadline=deadline)
        return msgspec.structs.replace(
            found,
            server="truncated",
            exact_entropy=False,
            max_top_k=2,
            max_generation_top_k=2,
            max_position_top_k=found.vocab_size,
            candidate_logprobs="single",
        )

    async def score(self, request, *, top_k):
        assert top_k <= 2
        scores = await super().score(request, top_k=top_k)
        bounds = entropy_bounds(scores.topk_logprobs, self._capabilities.vocab_size)
        lower, upper = (each.astype(np.float32) for each in bounds)
        return msgspec.structs.replace(scores, entropy=(lower + upper) / 2, entropy_lower=lower, entropy_upper=upper)

    async def score_at(self, request, positions, *, top_k):
        scores = await super().score(request, top_k=top_k)
        lower, upper = entropy_bounds(scores.topk_logprobs, self._capabilities.vocab_size)
        if top_k == self._capabilities.vocab_size:
            lower = upper = scores.entropy
        return ScoredPositions(
            topk_ids=scores.topk_ids[positions],
            topk_logprobs=scores.topk_logprobs[positions],
            entropy_lower=lower[positions],
            entropy_upper=upper[positions],
        )
"""


def run(directory: Path, *overrides: str):
    """The selections of its samples, and its metrics."""
    short = [FEW, *FOUR, "training.iterations=1", "evaluation=null", f"run.directory={directory}"]
    asked = ["policy.score_top_k=2", "policy.probe_top_k=2"]
    spot_async.run("configs/quickstart.yaml", [*short, *asked, *overrides])
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    (metrics,) = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(s["problem_id"], s["response_ids"], s["selected_positions"]) for s in samples], metrics


@pytest.mark.long
def test_a_run_on_truncated_distributions_probes_the_positions_of_one_on_whole_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "truncated_servers.py").write_text(TRUNCATED)
    monkeypatch.syspath_prepend(tmp_path)
    whole, exact = run(tmp_path / "whole")
    backends = [f"{role}.backend=truncated_servers:Truncated" for role in ("student", "teacher")]
    truncated, metrics = run(tmp_path / "truncated", *backends, "policy.refine_positions=1000")
    assert truncated == whole
    assert exact["spot/selection_exact"] == 1.0
    assert metrics["spot/selection_certain"] + metrics["spot/selection_refined"] == 1.0
    assert metrics["spot/refined_by_teacher"] + metrics["spot/refined_by_student"] > 0
    for name in ("requests", "sent_bytes", "received_bytes"):
        assert metrics[f"traffic/teacher/{name}"] > 0
