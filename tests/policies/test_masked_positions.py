"""Positions that a teacher could not score: no method learns from them, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.testing.services import generation, token_scores
from spot_async.testing.simulation import ScriptedStages, SimulatedTokenizer, make_policy, policy_context
from spot_async.types import BoolArray, Problem, Prompt, Sample, Verdict

VOCAB, TOKENS, K = 12, 6, 4
VALID = np.array([True, False, True, True, False, True])
PROMPT = Prompt(ordinal=7, problem=Problem(id="p", text="?", answer="1"), token_ids=np.array([3, 4], np.int32))


def scripted(valid: BoolArray | None = VALID) -> ScriptedStages:
    """A rollout, and a teacher whose masked rows hold numbers that would show in every method's result."""
    return ScriptedStages(
        generation(range(5, 5 + TOKENS), np.full(TOKENS, -1.0), finish_reason="length"),
        token_scores(
            np.where(VALID, -2.0, 0.0),
            entropy=np.where(VALID, 1.0, 2.4),  # the masked ones look most worth probing
            topk_ids=np.tile(np.arange(1, K + 1), (TOKENS, 1)),
            topk_logprobs=np.where(VALID[:, None], np.log([[0.4, 0.3, 0.2, 0.05]]), 0.0),
            valid=valid,
        ),
        verdict=Verdict.CORRECT,
    )


def policy_of(policy: Any, **settings: Any) -> Any:
    return make_policy(policy, policy_context(vocab_size=VOCAB, tokenizer=SimulatedTokenizer(VOCAB)), **settings)


async def sample_of(policy: type, stages: ScriptedStages, **settings: Any) -> Sample:
    (sample,) = await policy_of(policy, **settings).supervise(PROMPT, stages)
    return sample


@pytest.mark.parametrize("policy", [OpdPolicy, EopdPolicy, SpotPolicy])
async def test_masked_positions_have_no_advantage_and_their_share_is_reported(policy: type) -> None:
    settings = {EopdPolicy: {"top_k": K}, SpotPolicy: {"score_top_k": K}}.get(policy, {})
    sample = await sample_of(policy, scripted(), **settings)
    assert sample.supervision is not None
    assert sample.supervision.policy_mask is not None
    np.testing.assert_array_equal(sample.supervision.policy_mask, VALID)
    assert sample.metrics["teacher/masked"] == pytest.approx(2 / 6)
    assert sample.metrics["teacher/entropy_nats"] == pytest.approx(1.0)  # of the known ones
    for name in ("teacher_logprobs", "teacher_entropy_nats"):
        np.testing.assert_array_equal(np.isnan(sample.record[name]), ~VALID)


async def test_a_teacher_that_knows_every_position_reports_no_masks() -> None:
    sample = await sample_of(OpdPolicy, scripted(valid=None))
    assert sample.supervision is not None
    assert sample.supervision.policy_mask is None
    assert "teacher/masked" not in sample.metrics


@pytest.mark.parametrize("selection", ["score", "entropy", "earliest", "random"])
async def test_spot_neither_asks_about_nor_probes_masked_positions(selection: str) -> None:
    stages = scripted()
    sample = await sample_of(SpotPolicy, stages, score_top_k=K, positions=TOKENS, selection=selection)
    assert sample.supervision is not None
    (targets,) = sample.supervision.soft_targets
    assert targets.positions.tolist() == [0, 2, 3, 5]
    assert [positions for positions, _ in stages.candidates] == [[0, 2, 3, 5]]


async def test_eopds_gate_stays_shut_at_masked_positions() -> None:
    sample = await sample_of(EopdPolicy, scripted(), top_k=K, tau_nats=0.8)
    assert list(sample.record["gated_positions"]) == [0, 2, 3, 5]
    assert sample.metrics["eopd/gated"] == pytest.approx(4 / 6)


async def test_kd_keeps_the_cross_entropy_with_its_own_weight_where_candidates_are_unknown() -> None:
    sample = await sample_of(KdPolicy, scripted(), top_k=K, forward_kl_weight=0.25)
    assert sample.supervision is not None
    likelihood, forward = sample.supervision.soft_targets
    np.testing.assert_array_equal(likelihood.token_ids[:, 0], sample.supervision.response_ids)
    np.testing.assert_allclose(likelihood.weights, 0.75 / TOKENS, rtol=1e-6)
    assert likelihood.divergence is None
    assert forward.positions.tolist() == np.flatnonzero(VALID).tolist()
    np.testing.assert_allclose(forward.weights, 0.25 / TOKENS, rtol=1e-6)
    np.testing.assert_allclose(forward.probabilities.sum(axis=1), 1.0, rtol=1e-6)
    assert forward.tails is None


async def test_kd_without_forward_kl_asks_for_no_log_probabilities() -> None:
    policy = policy_of(KdPolicy, forward_kl_weight=0.0)

    class NotScored(ScriptedStages):
        score = None  # type: ignore[assignment]

    assert (policy.needs.teacher_top_k, policy.needs.teacher_responses) == (0, True)
    (written,) = await policy.supervise(PROMPT, NotScored(scripted().response))
    assert written.supervision is not None
    np.testing.assert_array_equal(written.supervision.soft_targets[0].token_ids, np.arange(5, 5 + TOKENS)[:, None])
