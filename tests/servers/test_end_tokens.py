"""What a teacher on a real server says of end tokens and of chosen tokens, against a plain forward of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from only_teacher import only
from parity import PARITY_NATS, Dense, decisions, own, soon

from spot_async import stages_for
from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.config import ScoreStageConfig, StagesConfig
from spot_async.policies.opd import OpdPolicy
from spot_async.protocols import PromptStages
from spot_async.stages.services import Services, StagesSettings
from spot_async.testing.services import SimulatedVerifier
from spot_async.testing.simulation import make_policy, simulated_vocabulary
from spot_async.types import PolicyNeeds, Problem, Prompt

PROMPT = np.array([11, 45, 207, 88, 301, 17, 140], np.int32)
RESPONSE = np.array([64, 250, 33, 120, 9], np.int32)  # 9 ends what the student writes
TEACHER_ENDS = (2, 60, 411)


def stages_of(backend: Any) -> PromptStages:
    """Return the stages of one prompt over a teacher that ends otherwise than the student."""
    policy = make_policy(OpdPolicy)
    policy.needs = PolicyNeeds(teacher_top_k=1, teacher_candidates=True)
    stages = stages_for(
        policy,
        Services(
            student=backend,
            teachers=only(backend, vocabulary=simulated_vocabulary(TEACHER_ENDS)),
            verifier=SimulatedVerifier(),
            vocabulary=simulated_vocabulary((9,)),
        ),
        StagesSettings(limits=StagesConfig(score=ScoreStageConfig(end_token="sum"))),
    )
    return stages.for_prompt(Prompt(ordinal=0, problem=Problem(id="p", text="?", answer="1"), token_ids=PROMPT))


@pytest.mark.parametrize(("kind", "fixture"), [(VllmBackend, "vllm_student"), (SglangBackend, "sglang_student")])
async def test_the_last_token_gets_what_all_that_end_the_teachers_responses_have_together(
    kind: Any, fixture: str, request: pytest.FixtureRequest, dense_logprobs: Dense, tmp_path: Path
) -> None:
    server = request.getfixturevalue(fixture)
    rows = decisions(dense_logprobs(server.model, [*PROMPT, *RESPONSE]), PROMPT, RESPONSE)
    expected = own(rows, RESPONSE).astype(np.float64)
    expected[-1] = np.logaddexp.reduce(rows[-1, list(TEACHER_ENDS)].astype(np.float64))
    settings = kind.Settings.model_validate({"url": server.url})
    async with kind(settings, role="teacher", model=str(server.model), run_directory=tmp_path) as backend:
        await backend.capabilities(deadline=soon())
        scores = await stages_of(backend).score(RESPONSE, top_k=3)
    np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=PARITY_NATS)


@pytest.mark.parametrize(
    ("kind", "fixture", "support"),
    [
        (VllmBackend, "vllm_student", "single"),
        (VllmBackend, "vllm_v2_student", "batched"),
        (SglangBackend, "sglang_student", "single"),
    ],
)
async def test_a_teacher_says_the_log_probabilities_of_chosen_tokens_at_all_positions(
    kind: Any, fixture: str, support: str, request: pytest.FixtureRequest, dense_logprobs: Dense, tmp_path: Path
) -> None:
    server = request.getfixturevalue(fixture)
    asked = [*RESPONSE[:-1].tolist(), TEACHER_ENDS[0]]  # what the teacher reads
    rows = decisions(dense_logprobs(server.model, [*PROMPT, *asked]), PROMPT, np.array(asked))
    ranks = np.argsort(-rows, axis=1)[:, [0, 15, 200, -1]]
    candidates = np.column_stack([np.full(len(RESPONSE), 9), np.where(ranks == 9, 10, ranks)]).astype(np.int32)
    theirs = np.where(candidates == 9, 2, np.where(candidates == 2, 9, candidates)).astype(np.int64)
    settings = kind.Settings.model_validate({"url": server.url})
    async with kind(settings, role="teacher", model=str(server.model), run_directory=tmp_path) as backend:
        said = await backend.capabilities(deadline=soon())
        served = await stages_of(backend).teacher_candidates(RESPONSE, np.arange(len(RESPONSE)), candidates)
    assert said.candidate_logprobs == support
    np.testing.assert_allclose(served, np.take_along_axis(rows, theirs, axis=1), rtol=0, atol=PARITY_NATS)
