"""Positions that a teacher could not score: no method learns from them, and nothing else changes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from spot_async.models.end_tokens import EndTokens
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.types import (
    BoolArray,
    Generation,
    PolicyContext,
    Problem,
    Prompt,
    Sample,
    TokenScores,
    Verdict,
    VersionSpan,
    WeightVersion,
)

VOCAB, TOKENS, K = 12, 6, 4
VALID = np.array([True, False, True, True, False, True])
PROMPT = Prompt(ordinal=7, problem=Problem(id="p", text="?", answer="1"), token_ids=np.array([3, 4], np.int32))


class Tokenizer:
    all_special_ids = (0,)
    added_tokens_decoder: ClassVar = {}

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(VOCAB)}

    def decode(self, ids: Any) -> str:
        return f"t{ids[0]}"


class Stages:
    """A rollout, and a teacher whose masked rows hold numbers that would show in every method's result."""

    student = teacher = None  # nobody said what they offer: all that a policy asks for
    ends = EndTokens((2,), (2,), "replace")

    def __init__(self, valid: BoolArray | None = VALID) -> None:
        self.valid = valid
        self.asked: list[int] = []  # positions of the student's candidates
        self.scored = 0

    async def rollout(self, *, n: int = 0, top_k: int = 0) -> Generation:
        return Generation(
            token_ids=np.arange(5, 5 + TOKENS, dtype=np.int32),
            logprobs=np.full(TOKENS, -1.0, np.float32),
            finish_reason="length",
            version_spans=(VersionSpan(0, TOKENS, WeightVersion(0, 0)),),
        )

    teacher_response = rollout

    async def score(self, response_ids: Any, *, top_k: int) -> TokenScores:
        self.scored += 1
        entropy = np.where(VALID, 1.0, 2.4).astype(np.float32)  # the masked ones look most worth probing
        return TokenScores(
            logprobs=np.where(VALID, -2.0, 0.0).astype(np.float32),
            topk_ids=np.tile(np.arange(1, top_k + 1, dtype=np.int32), (TOKENS, 1)),
            topk_logprobs=np.where(VALID[:, None], np.log([[0.4, 0.3, 0.2, 0.05]]), 0.0)[:, :top_k].astype(np.float32),
            entropy=entropy,
            entropy_lower=entropy,
            entropy_upper=entropy,
            version=WeightVersion(0, 0),
            valid=self.valid,
        )

    async def candidate_logprobs(self, response_ids: Any, positions: Any, candidate_ids: Any, *, version: Any) -> Any:
        self.asked += positions.tolist()
        return np.full(candidate_ids.shape, np.log(0.05), np.float32)

    async def probe(self, response_ids: Any, position: int, candidate_id: int, *, n: int) -> Generation:
        return await self.rollout()

    async def verify(self, response_ids: Any) -> Verdict:
        return Verdict.CORRECT

    def decode(self, token_ids: Any) -> str:
        return " ".join(map(str, token_ids))


async def sample_of(policy: type, stages: Stages, **settings: Any) -> Sample:
    context = PolicyContext(vocab_size=VOCAB, tokenizer=Tokenizer())
    (sample,) = await policy(policy.Settings(**settings), context).supervise(PROMPT, stages)
    return sample


@pytest.mark.parametrize("policy", [OpdPolicy, EopdPolicy, SpotPolicy])
async def test_masked_positions_have_no_advantage_and_their_share_is_reported(policy: type) -> None:
    settings = {EopdPolicy: {"top_k": K}, SpotPolicy: {"score_top_k": K}}.get(policy, {})
    sample = await sample_of(policy, Stages(), **settings)
    assert sample.supervision is not None
    assert sample.supervision.policy_mask is not None
    np.testing.assert_array_equal(sample.supervision.policy_mask, VALID)
    assert sample.metrics["teacher/masked"] == pytest.approx(2 / 6)
    assert sample.metrics["teacher/entropy_nats"] == pytest.approx(1.0)  # of the known ones
    for name in ("teacher_logprobs", "teacher_entropy_nats"):
        np.testing.assert_array_equal(np.isnan(sample.record[name]), ~VALID)


async def test_a_teacher_that_knows_every_position_reports_no_masks() -> None:
    sample = await sample_of(OpdPolicy, Stages(valid=None))
    assert sample.supervision is not None
    assert sample.supervision.policy_mask is None
    assert "teacher/masked" not in sample.metrics


@pytest.mark.parametrize("selection", ["score", "entropy", "random"])
async def test_spot_neither_asks_about_nor_probes_masked_positions(selection: str) -> None:
    stages = Stages()
    sample = await sample_of(SpotPolicy, stages, score_top_k=K, positions=TOKENS, selection=selection)
    assert sample.supervision is not None
    assert sample.supervision.soft_targets is not None
    assert sample.supervision.soft_targets.positions.tolist() == [0, 2, 3, 5]
    assert stages.asked == ([0, 2, 3, 5] if selection == "score" else [])


async def test_eopds_gate_stays_shut_at_masked_positions() -> None:
    sample = await sample_of(EopdPolicy, Stages(), top_k=K, tau_nats=0.8)
    assert list(sample.record["gated_positions"]) == [0, 2, 3, 5]
    assert sample.metrics["eopd/gated"] == pytest.approx(4 / 6)


async def test_kd_keeps_the_cross_entropy_with_its_own_weight_where_candidates_are_unknown() -> None:
    sample = await sample_of(KdPolicy, Stages(), top_k=K, forward_kl_weight=0.25)
    assert sample.supervision is not None
    targets = sample.supervision.soft_targets
    assert targets is not None
    np.testing.assert_allclose(targets.probabilities.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(targets.weights, np.where(VALID, 1.0, 0.75) / TOKENS, rtol=1e-6)
    np.testing.assert_allclose(targets.probabilities[:, 0], np.where(VALID, 0.75, 1.0), rtol=1e-6)
    assert targets.offsets is not None
    np.testing.assert_array_equal(targets.offsets[~VALID], 0.0)


async def test_kd_without_forward_kl_asks_for_no_log_probabilities_and_keeps_its_file_readable(tmp_path: Any) -> None:
    path = str(tmp_path / "responses")
    context = PolicyContext(vocab_size=VOCAB, tokenizer=Tokenizer())
    policy = KdPolicy(KdPolicy.Settings(forward_kl_weight=0.0, save=path), context)
    stages = Stages()
    assert (policy.needs.teacher_top_k, policy.needs.teacher_responses) == (0, True)
    (written,) = await policy.supervise(PROMPT, stages)  # type: ignore[arg-type]
    assert stages.scored == 0

    (loaded,) = await KdPolicy(KdPolicy.Settings(forward_kl_weight=0.0, load=path), context).supervise(
        PROMPT,
        stages,  # type: ignore[arg-type]
    )
    assert written.supervision is not None
    assert loaded.supervision is not None
    first, second = written.supervision.soft_targets, loaded.supervision.soft_targets
    assert msgspec.json.encode(first, enc_hook=lambda a: a.tolist()) == msgspec.json.encode(
        second, enc_hook=lambda a: a.tolist()
    )
    assert first is not None
    np.testing.assert_array_equal(first.token_ids, np.arange(5, 5 + TOKENS)[:, None])
    with pytest.raises(
        Exception, match=r"policy\.top_k=16: .* holds the teacher's top-0; set policy\.forward_kl_weight=0"
    ):
        KdPolicy(KdPolicy.Settings(load=path), context)
