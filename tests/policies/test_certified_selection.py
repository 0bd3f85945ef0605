"""SPOT and EOPD on servers that give truncated distributions: what they ask, choose and report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from spot_async.errors import VersionMismatchError
from spot_async.models.entropy import entropy_bounds
from spot_async.policies.acquisition import select_positions
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.run_directory.samples import Branch
from spot_async.testing.services import capabilities
from spot_async.testing.simulation import SimulatedTokenizer, make_policy, policy_context
from spot_async.tools.inspect.view import branch_state
from spot_async.types import (
    Capabilities,
    Generation,
    Judgement,
    Problem,
    Prompt,
    ScoredPositions,
    TokenScores,
    Verdict,
    VersionSpan,
    WeightVersion,
)

VOCAB, TOKENS = 1200, 120
PROMPT = Prompt(ordinal=0, problem=Problem(id="p", text="?", answer="1"), token_ids=np.array([3, 4], np.int32))
OLD, NEW = WeightVersion(0, 1), WeightVersion(0, 2)
LOCAL = capabilities(VOCAB, max_generation_top_k=VOCAB)
TRUNCATED_TEACHER = {"exact_entropy": False, "max_top_k": 20, "max_position_top_k": VOCAB}
SINGLE_STUDENT = {"candidate_logprobs": "single", "max_generation_top_k": 20}
CONTEXT = policy_context(vocab_size=VOCAB, tokenizer=SimulatedTokenizer(VOCAB))


def top(logprobs, k):
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
    return ids.astype(np.int32), np.take_along_axis(logprobs, ids, -1).astype(np.float32)


@dataclass
class TruncatedStages:
    """`PromptStages` over whole rows, of which servers show what their capabilities say; remembers what was asked."""

    rows: tuple[np.ndarray, np.ndarray]  # teacher and student (T, V): what is asked for on purpose
    bulk: tuple[np.ndarray, np.ndarray]  # the same as scores and rollouts have them
    student: Capabilities = LOCAL
    teacher: Capabilities = LOCAL
    teachers: ClassVar = {"": 1.0}
    spans: tuple[VersionSpan, ...] = (VersionSpan(0, TOKENS, NEW),)
    rollout_top_k: list = field(default_factory=list)
    score_top_k: list = field(default_factory=list)
    candidates: list = field(default_factory=list)  # (positions, version) of each request
    wider: list = field(default_factory=list)  # (positions, top_k)

    async def rollout(self, *, n: int = 0, top_k: int = 0) -> Generation:
        self.rollout_top_k.append(top_k)
        ids = np.maximum(self.bulk[1].argmax(-1), 2).astype(np.int32)
        topk = dict(zip(("topk_ids", "topk_logprobs"), top(self.bulk[1], top_k), strict=True)) if top_k else {}
        logprobs = self.bulk[1][np.arange(TOKENS), ids].astype(np.float32)
        return Generation(token_ids=ids, logprobs=logprobs, finish_reason="length", version_spans=self.spans, **topk)

    async def score(self, response_ids: np.ndarray, *, top_k: int, teacher: str = "") -> TokenScores:
        self.score_top_k.append(top_k)
        ids, logprobs = top(self.bulk[0], top_k)
        lower, upper = entropy_bounds(logprobs, VOCAB)
        if self.teacher.exact_entropy:
            lower = upper = -(np.exp(self.bulk[0]) * self.bulk[0]).sum(-1)
        lower, upper = lower.astype(np.float32), upper.astype(np.float32)
        return TokenScores(
            logprobs=self.bulk[0][np.arange(TOKENS), response_ids].astype(np.float32),
            topk_ids=ids,
            topk_logprobs=logprobs,
            entropy=(lower + upper) / 2,
            entropy_lower=lower,
            entropy_upper=upper,
            version=WeightVersion(0, 0),
        )

    async def score_at(self, response_ids: np.ndarray, positions: np.ndarray, *, top_k: int) -> ScoredPositions:
        self.wider.append((positions.tolist(), top_k))
        rows = self.rows[0][positions]
        ids, logprobs = top(rows, top_k)
        lower, upper = entropy_bounds(logprobs, VOCAB)
        if top_k == VOCAB:
            lower = upper = -(np.exp(rows) * rows).sum(-1)
        return ScoredPositions(topk_ids=ids, topk_logprobs=logprobs, entropy_lower=lower, entropy_upper=upper)

    async def candidate_logprobs(
        self, response_ids: np.ndarray, positions: np.ndarray, candidate_ids: np.ndarray, *, version: WeightVersion
    ) -> np.ndarray:
        if version == OLD:
            raise VersionMismatchError(f"the server holds {NEW}, not {version}")
        self.candidates.append((positions.tolist(), version))
        return self.rows[1][positions[:, None], candidate_ids].astype(np.float32)

    async def verify(self, response_ids: np.ndarray) -> Judgement:
        return Judgement(Verdict.WRONG)

    def decode(self, token_ids: np.ndarray) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture(scope="module")
def stages_of(heavy_tailed, recomputed):
    def make(seed: int, *, noise: float = 0.02, student: Any = None, teacher: Any = None, **rest: Any):
        rows = heavy_tailed(seed, TOKENS, VOCAB)
        offers = {} if noise == 0 else {"logprob_noise_nats": noise}
        return TruncatedStages(
            rows=rows,
            bulk=(recomputed(rows[0], noise, seed + 1), recomputed(rows[1], noise, seed + 2)),
            student=msgspec.structs.replace(LOCAL, **offers, **(student or {})),
            teacher=msgspec.structs.replace(LOCAL, **offers, **(teacher or {})),
            **rest,
        )

    return make


@pytest.fixture(scope="module")
def exact(dense_scores):
    """The selection from whole distributions; no token of the responses is masked but those below 2."""

    def of(stages: TruncatedStages, part: str = "Full") -> list[int]:
        return select_positions(dense_scores(*stages.rows, 16)[part], np.ones(TOKENS, bool), 2).tolist()

    return of


async def supervise(stages: TruncatedStages, **choices: Any):
    policy = make_policy(SpotPolicy, CONTEXT, verifier_guidance=False, **choices)
    (sample,) = await policy.supervise(PROMPT, stages)
    return sample


def share(sample, outcome):
    return sample.metrics[f"spot/selection_{outcome}"]


async def test_a_truncated_choice_is_the_exact_one_and_few_positions_are_asked_for(stages_of, exact):
    outcomes = set()
    for seed in range(10):
        stages = stages_of(seed, student=SINGLE_STUDENT, teacher=TRUNCATED_TEACHER)
        sample = await supervise(stages)
        assert sample.record["selected_positions"] == exact(stages)
        assert stages.rollout_top_k == stages.score_top_k == [20]
        assert all(branch["certain"] for branch in sample.record["branches"])
        asked = {t for positions, _ in stages.candidates for t in positions}
        wider = {t for positions, _ in stages.wider for t in positions}
        assert len(asked | wider) <= 12
        assert {version for _, version in stages.candidates} <= {NEW}
        assert sample.metrics["spot/refined_by_student"] == len(asked)
        assert sample.metrics["spot/refined_by_teacher"] == len(wider)
        assert share(sample, "certain") == (not (asked | wider))
        assert share(sample, "certain") + share(sample, "refined") == 1.0
        outcomes.add(share(sample, "refined"))
    assert outcomes == {0.0, 1.0}


async def test_without_anyone_to_ask_what_is_open_falls_to_the_midpoints_and_is_called_uncertain(stages_of):
    open_ends = 0
    for seed in range(10):
        nobody = {"candidate_logprobs": "none", "max_generation_top_k": 20}
        stages = stages_of(seed, student=nobody, teacher=TRUNCATED_TEACHER | {"max_position_top_k": 0})
        sample = await supervise(stages)
        assert stages.candidates == stages.wider == []
        assert len(sample.record["selected_positions"]) == 2
        certain = [branch["certain"] for branch in sample.record["branches"]]
        assert share(sample, "certain") == all(certain)
        assert share(sample, "uncertain") == (not all(certain))
        branches = [msgspec.convert(branch, Branch) for branch in sample.record["branches"]]  # as `inspect` reads them
        assert ["not certain" in branch_state(branch)[0] for branch in branches] == [not each for each in certain]
        open_ends += share(sample, "uncertain")
    assert open_ends > 0


async def test_no_more_positions_are_asked_for_than_the_configuration_says(stages_of):
    for budget in (0, 1):
        stages = [stages_of(seed, student=SINGLE_STUDENT, teacher=TRUNCATED_TEACHER) for seed in range(6)]
        for each in stages:
            await supervise(each, refine_positions=budget)
        asked = [{t for positions, _ in each.candidates + each.wider for t in positions} for each in stages]
        assert max(map(len, asked)) == budget


async def test_a_student_that_holds_other_weights_leaves_what_the_rollout_served_and_is_counted(stages_of, exact):
    mismatches = 0
    for seed in range(6):
        spans = (VersionSpan(0, 60, OLD), VersionSpan(60, TOKENS, NEW))
        stages = stages_of(seed, noise=0.1, student=SINGLE_STUDENT, teacher=TRUNCATED_TEACHER, spans=spans)
        sample = await supervise(stages)
        assert all(t >= 60 for positions, _ in stages.candidates for t in positions)
        assert len(sample.record["selected_positions"]) == 2
        if share(sample, "uncertain") == 0:
            assert sample.record["selected_positions"] == exact(stages)
        mismatches += sample.metrics["spot/version_mismatches"]
    assert mismatches > 0


async def test_a_student_that_reads_whole_responses_is_asked_once_when_only_the_teacher_is_truncated(stages_of, exact):
    for seed in range(4):
        stages = stages_of(seed, teacher=TRUNCATED_TEACHER)
        sample = await supervise(stages)
        assert stages.rollout_top_k == [0]
        assert stages.candidates[0][0] == list(range(TOKENS))
        assert sample.record["selected_positions"] == exact(stages)


async def test_with_whole_distributions_nothing_is_estimated_and_nothing_more_is_asked(stages_of, exact):
    stages = stages_of(3, noise=0.0)
    sample = await supervise(stages)
    assert (stages.rollout_top_k, stages.score_top_k, stages.wider) == ([0], [16], [])
    assert sample.record["selected_positions"] == exact(stages)
    assert share(sample, "exact") == 1.0
    assert "spot/refined_by_student" not in sample.metrics


@pytest.mark.parametrize(("settings", "part"), [({"selection": "entropy"}, "H"), ({"score_variant": "HC"}, "HC")])
async def test_scores_of_the_teacher_alone_ask_the_student_only_about_what_was_selected(
    stages_of, exact, settings, part
):
    for seed in range(4):
        stages = stages_of(seed, student=SINGLE_STUDENT, teacher=TRUNCATED_TEACHER)
        sample = await supervise(stages, **settings)
        assert stages.rollout_top_k == [0]
        assert [positions for positions, _ in stages.candidates] == [sample.record["selected_positions"]]
        assert sample.record["selected_positions"] == exact(stages, part)


@pytest.mark.parametrize("cannot", ["no candidates", "other weights by now"])
async def test_a_control_on_a_student_that_cannot_tell_is_recorded_without_the_scores_parts(stages_of, exact, cannot):
    spans = (VersionSpan(0, TOKENS, OLD if cannot == "other weights by now" else NEW),)
    student = {**SINGLE_STUDENT, "candidate_logprobs": "none" if cannot == "no candidates" else "single"}
    stages = stages_of(3, student=student, teacher=TRUNCATED_TEACHER, spans=spans)
    sample = await supervise(stages, selection="entropy")
    assert sample.record["selected_positions"] == exact(stages, "H")
    for branch in sample.record["branches"]:
        assert branch["score_parts"] == {}
        assert all(candidate["student"] is None for candidate in branch["candidates"])


async def test_gaps_are_recorded_where_the_students_row_is_known_and_are_those_of_whole_distributions(
    stages_of, dense_scores
):
    stages = stages_of(3, noise=0.0, teacher=TRUNCATED_TEACHER)
    batched = (await supervise(stages)).record["gap"]
    np.testing.assert_allclose(batched, dense_scores(*stages.rows, 16)["gap"], atol=1e-5)
    single = stages_of(3, noise=0.0, student=SINGLE_STUDENT, teacher=TRUNCATED_TEACHER)
    known = ~np.isnan((await supervise(single)).record["gap"])
    assert 2 <= known.sum() < TOKENS
    np.testing.assert_allclose((await supervise(single)).record["gap"][known], batched[known], atol=1e-5)


async def test_eopds_gate_counts_what_the_teachers_noise_leaves_open(stages_of):
    stages = stages_of(5, noise=0.1, teacher=TRUNCATED_TEACHER)
    policy = make_policy(EopdPolicy, CONTEXT)
    (sample,) = await policy.supervise(PROMPT, stages)
    entropy = -(np.exp(stages.rows[0]) * stages.rows[0]).sum(-1)
    gated = np.isin(np.arange(TOKENS), sample.record["gated_positions"])
    wrong = gated != (entropy > 0.8)
    scores = await stages.score(np.zeros(TOKENS, int), top_k=16)
    within = (scores.entropy_lower <= 0.8) & (scores.entropy_upper > 0.8)
    assert wrong.sum() <= sample.metrics["eopd/uncertain"] * TOKENS
    assert sample.metrics["eopd/uncertain"] > within.mean()
