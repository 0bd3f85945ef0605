"""`stages.score.end_token: sum` with a teacher on a real server, against a plain forward of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import PARITY_NATS, Dense, decisions, own, soon

from spot_async import stages_for
from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.config import ScoreStageConfig, StagesConfig
from spot_async.policies.opd import OpdPolicy
from spot_async.stages.services import Services, StagesSettings
from spot_async.testing.services import SimulatedVerifier
from spot_async.testing.simulation import make_policy, simulated_vocabulary
from spot_async.types import Problem, Prompt

PROMPT = np.array([11, 45, 207, 88, 301, 17, 140], np.int32)
RESPONSE = np.array([64, 250, 33, 120, 9], np.int32)  # 9 ends what the student writes
TEACHER_ENDS = (2, 60, 411)


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
        stages = stages_for(
            make_policy(OpdPolicy),
            Services(
                student=backend,
                teacher=backend,
                verifier=SimulatedVerifier(),
                vocabulary=simulated_vocabulary((9,)),
                teacher_vocabulary=simulated_vocabulary(TEACHER_ENDS),
            ),
            StagesSettings(limits=StagesConfig(score=ScoreStageConfig(end_token="sum"))),
        )
        prompt = Prompt(ordinal=0, problem=Problem(id="p", text="?", answer="1"), token_ids=PROMPT)
        scores = await stages.for_prompt(prompt).score(RESPONSE, top_k=3)
    np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=PARITY_NATS)
