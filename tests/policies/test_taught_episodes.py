"""KD beside an environment: the teacher plays, and the student learns the tokens that it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from only_teacher import only
from transformers import AutoModelForCausalLM

from spot_async.models.responses import counted_tokens
from spot_async.policies.kd import KdPolicy
from spot_async.testing import loss_of, make_policy, simulated_prompts, simulated_run
from spot_async.testing.environments import simulated_environment
from spot_async.testing.services import VOCAB_SIZE, SimulatedTeacher
from spot_async.testing.simulation import PROBLEMS, SimulatedRun, simulated_vocabulary
from spot_async.types import Generation, IntArray, SamplingSettings, ScoreRequest, Supervision

TOP_K, WEIGHT = 6, 0.3


class Noting(SimulatedTeacher):
    """Notes what it wrote, and behind which tokens, and in which session."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[bytes, IntArray] = {}
        self.sessions: list[str | None] = []

    async def generate(
        self, prompt_ids: IntArray, sampling: SamplingSettings, *, session: str | None = None, **rest: Any
    ) -> Generation:
        found = await super().generate(prompt_ids, sampling, session=session, **rest)
        assert prompt_ids.tobytes() not in self.written  # each turn is asked for once
        self.written[prompt_ids.tobytes()] = found.token_ids
        self.sessions.append(session)
        return found

    def places(self, sample: Supervision) -> list[int]:
        """Return the positions of a response's tokens that this teacher wrote."""
        whole, found = np.concatenate([sample.prompt_ids, sample.response_ids]), []
        for t in range(len(sample.response_ids)):
            before = whole[: len(sample.prompt_ids) + t]
            if (turn := self.written.get(before.astype(np.int32).tobytes())) is not None:
                assert whole[len(before) :][: len(turn)].tolist() == turn.tolist()
                found += range(t, t + len(turn))
        return found


def run_of(teacher: Noting, **changes: Any) -> SimulatedRun:
    environment = simulated_environment(simulated_vocabulary())
    policy = make_policy(KdPolicy, top_k=TOP_K, forward_kl_weight=WEIGHT)
    return simulated_run(policy, teachers=only(teacher), environments={"": environment}, **changes)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_loss_is_the_dense_mean_over_the_tokens_that_the_teacher_wrote(
    max_staleness: int, random_model: Callable[..., Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model(vocab_size=VOCAB_SIZE))
    dense = deepcopy(model).double()
    teacher = Noting()
    run = run_of(teacher, iterations=2, max_staleness=max_staleness)

    def loss(sample: Supervision) -> Any:
        prompt, own = sample.prompt_ids, teacher.places(sample)
        assert np.flatnonzero(counted_tokens(sample)).tolist() == own
        whole = torch.tensor(np.concatenate([prompt, sample.response_ids]).astype(np.int64))
        log_q = dense(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        rows = asyncio.run(teacher._rows(ScoreRequest(prompt, sample.response_ids, 1.0, 0.0)))
        of_each = []
        for t in own:
            ids = np.argsort(-rows[t])[:TOP_K]
            log_p = torch.tensor(rows[t][ids]).log_softmax(-1)
            forward = (log_p.exp() * (log_p - log_q[t][ids])).sum()
            of_each.append(WEIGHT * forward - (1 - WEIGHT) * log_q[t, sample.response_ids[t]])
        return torch.stack(of_each).mean()

    batch = run.batches[0]
    assert sum(not counted_tokens(each).all() for each in batch) > len(batch) / 2
    for each in batch[:6]:
        assert loss_of([each], model).loss == pytest.approx(loss(each).item(), rel=1e-4)
    expected = torch.stack([loss(each) for each in batch]).mean()
    expected.backward()
    found = loss_of(batch, model)
    assert found.loss == pytest.approx(expected.item(), rel=1e-4)
    norm = torch.stack([each.grad.norm() for each in dense.parameters() if each.grad is not None]).norm()
    assert found.grad_norm == pytest.approx(norm.item(), rel=1e-3)


def test_later_epochs_learn_from_the_same_episodes_and_show_them() -> None:
    teacher = Noting()
    run = run_of(teacher, iterations=4)  # two epochs
    first, again = run.samples[:PROBLEMS], run.samples[PROBLEMS:]
    by_problem = {each.record["problem_id"]: each for each in again}
    for each in first:
        later = by_problem[each.record["problem_id"]]
        assert later.metrics == each.metrics
        for name in ("turns", "ended", "writers", "response", "verdict"):
            assert later.record.get(name) == each.record.get(name)
    asked = [each.stages.environments[""].counters.completed for each in (run, run_of(Noting(), iterations=2))]
    assert asked[0] == asked[1] > PROBLEMS
    several = [each for each in first if len(each.record["turns"]) > 1]
    for each in several:
        read = {t for start, end, who in each.record["writers"] if who == "environment" for t in range(start, end)}
        assert each.metrics["teacher/tokens"] == len(each.record["response_ids"]) - len(read)
        assert {start + 1 for start in read} >= {*each.record["turns"][1:]}
    assert len(several) > PROBLEMS / 2


def test_an_episode_of_a_teachers_waits_for_no_other_response() -> None:
    teacher = Noting()
    run_of(teacher, iterations=1, max_staleness=2, prompts=simulated_prompts(16))
    assert len({*teacher.sessions}) == 16
    assert len(teacher.sessions) > 16


def test_what_a_teacher_read_in_place_of_the_students_prompt_stands_beside_its_episode() -> None:
    other = np.arange(2, 8, dtype=np.int32)
    prompts = [replace(each, teacher_ids=other) for each in simulated_prompts(1)]
    policy = make_policy(KdPolicy, forward_kl_weight=0)  # so that nothing is scored
    environment = simulated_environment(simulated_vocabulary())
    run = simulated_run(
        policy, prompts=prompts, iterations=1, batch_size=1, environments={"": environment}, teachers=only(Noting())
    )
    assert run.samples[0].record["teacher_prompt"] == "2 3 4 5 6 7"
