"""One recorded set of rollouts replayed through every backend: the first iteration's loss is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay import Recorded, first_loss, supervise
from tiny_models import VOCAB_SIZE

from spot_async.base import registry
from spot_async.checks.diagnosis import capabilities
from spot_async.config import ModelConfig
from spot_async.config.loading import validate_as
from spot_async.running.services import send_initial_weights

LOSS_TOLERANCE = 1e-3
POLICIES: dict[str, dict[str, Any]] = {
    "opd": {},
    "spot": {"positions": 2, "score_top_k": 16, "probe_top_k": 4, "beta": 1.0},
}
# Who scores the rollouts and who is asked for the student's candidates: (backend, fixture) of teacher and student.
CASES = {
    "vllm": (("vllm", "vllm_teacher"), ("vllm", "vllm_student")),
    "vllm through openai": (("openai", "vllm_teacher"), ("vllm", "vllm_student")),
    "sglang": (("sglang", "sglang_teacher"), ("sglang", "sglang_student")),
}


@pytest.fixture(scope="module")
def vllm_teacher(start_vllm: Any, models: Any) -> Iterator[Any]:
    """It serves whole distributions: with bounds only, some positions would be selected by their middle."""
    with start_vllm(models.teacher, max_logprobs=VOCAB_SIZE + 1) as server:
        yield server


@pytest.fixture(scope="module")
def sglang_teacher(start_sglang: Any, models: Any) -> Iterator[Any]:
    with start_sglang(models.teacher) as server:
        yield server


async def start(stack: AsyncExitStack, kind: str, role: str, model: Path, scratch: Path, url: str | None) -> Any:
    """A running backend that holds the model's weights."""
    backend: dict[str, Any] = {"kind": kind} | ({} if url is None else {"url": url})
    if url is not None and role == "teacher":
        backend["top_k"] = VOCAB_SIZE
    config = validate_as(ModelConfig, {"model": str(model), "backend": backend})
    made = registry.load("backends", kind)(config.backend, role=role, model=str(model), run_directory=scratch)
    await stack.enter_async_context(made)
    if role == "student":
        await send_initial_weights(config, made, await capabilities(made), lambda phase: None)
    return made


@pytest.mark.parametrize("case", CASES)
async def test_replayed_rollouts_give_the_same_first_loss(
    case: str, models: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    served = [(kind, request.getfixturevalue(fixture).url) for kind, fixture in CASES[case]]
    directories = (models.student, models.teacher)
    async with AsyncExitStack() as stack:
        local_student = await start(stack, "local", "student", models.student, tmp_path, None)
        local_teacher = await start(stack, "local", "teacher", models.teacher, tmp_path, None)
        (teacher_kind, teacher_url), (student_kind, student_url) = served
        teacher = await start(stack, teacher_kind, "teacher", models.teacher, tmp_path, teacher_url)
        student = await start(stack, student_kind, "student", models.student, tmp_path, student_url)
        record = Recorded(local_student)
        for policy, settings in POLICIES.items():
            expected = await supervise(policy, settings, record, local_student, local_teacher, directories)
            found = await supervise(policy, settings, record, student, teacher, directories)
            for ours, theirs in zip(expected, found, strict=True):
                np.testing.assert_array_equal(ours.response_ids, theirs.response_ids)
                for own, other in zip(ours.soft_targets, theirs.soft_targets, strict=False):
                    np.testing.assert_array_equal(own.positions, other.positions)
            losses = [
                first_loss(batch, models.student, tmp_path / policy / name)
                for name, batch in (("local", expected), ("other", found))
            ]
            assert abs(losses[0]["loss"]) > 10 * LOSS_TOLERANCE  # there is something to agree on
            assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], abs=LOSS_TOLERANCE)
            assert losses[1]["loss_branch"] == pytest.approx(losses[0]["loss_branch"], abs=LOSS_TOLERANCE)
            assert (losses[0]["loss_branch"] != 0) == (policy == "spot")
