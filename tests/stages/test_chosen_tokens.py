"""A policy that compares on the student's own top-k, over simulated servers: it asks the teacher about those tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spot_async.terms import on_policy, reverse_kl, row_bytes, soft_targets
from spot_async.testing import simulated_run
from spot_async.testing.services import VOCAB_SIZE, Latency, SimulatedTeacher
from spot_async.types import PolicyNeeds, Sample, ScoreRequest

K = 4


class OnTheStudentsTopK:
    needs = PolicyNeeds(teacher_candidates=True, outcomes=False, term_bytes_per_token=row_bytes(K))

    async def supervise(self, prompt, stages):
        rollout = await stages.rollout(top_k=K)
        positions = np.arange(len(rollout.token_ids), dtype=np.int32)
        asked = await stages.teacher_candidates(rollout.token_ids, positions, rollout.topk_ids)
        weights = np.full(len(positions), 1 / len(positions))
        targets = soft_targets(positions, rollout.topk_ids, asked, weights, reverse_kl())
        return [Sample(supervision=on_policy(prompt, rollout, soft_targets=(targets,)), metrics={}, record={})]


@pytest.mark.parametrize("staleness", [0, 2])
def test_its_targets_are_the_teachers_probabilities_of_what_the_student_finds_likeliest(staleness):
    run = simulated_run(OnTheStudentsTopK(), iterations=3, batch_size=4, max_staleness=staleness)
    samples = [sample for batch in run.trainer.batches for sample in batch]
    assert len(samples) == 12
    teacher = SimulatedTeacher(Latency(0.0, 0.0))
    for sample in samples:
        request = ScoreRequest(sample.prompt_ids, sample.response_ids, 1.0, 0.0)
        whole = asyncio.run(teacher.score(request, top_k=VOCAB_SIZE))
        rows = np.zeros((len(sample.response_ids), VOCAB_SIZE))
        np.put_along_axis(rows, whole.topk_ids.astype(np.int64), np.exp(whole.topk_logprobs.astype(np.float64)), axis=1)
        (targets,) = sample.soft_targets
        assert targets.token_ids.shape == (len(rows), K)
        expected = np.take_along_axis(rows, targets.token_ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(targets.probabilities, expected, rtol=1e-5)
        np.testing.assert_allclose(targets.tails, 1.0 - expected.sum(axis=1), rtol=1e-4)
