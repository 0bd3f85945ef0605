"""Methods with several teachers: each pulls and is compared with its share, and what each said is recorded."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from spot_async.config import TrainingConfig
from spot_async.loop.events import mean_metrics
from spot_async.policies.distill import DistillPolicy
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.telemetry.console import accuracy_words, domain_words, slope_words
from spot_async.telemetry.outcome_slope import outcome_metrics, outcome_words
from spot_async.testing.losses import loss_of
from spot_async.testing.services import generation, token_scores
from spot_async.testing.simulation import (
    ScriptedStages,
    make_policy,
    policy_context,
    simulated_prompts,
)
from spot_async.types import Sample, Verdict

STUDENT = np.array([-1.0, -2.0, -0.5], np.float32)
MATH = token_scores([-0.5, -3.0, -0.5], entropy=[0.1, 2.0, 0.1], topk_ids=[5, 7], topk_logprobs=[-0.5, -1.5])
CODE = token_scores([-2.0, -1.0, -0.25], entropy=[2.0, 2.0, 0.1], topk_ids=[6, 7], topk_logprobs=[-0.7, -0.9])
SHARES = {"math": 0.75, "code": 0.25}


def stages(**changes):
    found = ScriptedStages(generation([5, 6, 1], STUDENT), teachers={"math": MATH, "code": CODE}, **changes)
    found.teachers = SHARES
    return found


async def sample(policy, given=None, prompt=None, **settings) -> Sample:
    made = make_policy(policy, policy_context(teachers=tuple(SHARES)), **settings)
    (found,) = await made.supervise(prompt or next(simulated_prompts()), given or stages())
    return found


@pytest.fixture(scope="module")
def model(student):
    return AutoModelForCausalLM.from_pretrained(student)


async def test_opd_is_pulled_towards_the_mean_of_their_log_probabilities(model):
    found = await sample(OpdPolicy)
    expected = 0.75 * MATH.logprobs + 0.25 * CODE.logprobs
    np.testing.assert_allclose(loss_of([found], model).advantages[0], expected - STUDENT, rtol=1e-6)
    recomputed = loss_of([found], model, training=TrainingConfig(iterations=1, behavior="recomputed"))
    np.testing.assert_allclose(recomputed.advantages[0], expected - recomputed.live[0].logprobs, rtol=1e-5)


async def test_what_each_said_is_in_metrics_and_record_under_its_name():
    found = await sample(OpdPolicy)
    assert found.metrics["teacher/math/pull_nats"] == pytest.approx(float((MATH.logprobs - STUDENT).mean()))
    assert found.metrics["teacher/code/entropy_nats"] == pytest.approx(float(CODE.entropy.mean()))
    assert not {name for name in found.metrics if name.startswith("teacher/") and name.count("/") < 2}
    assert found.record["teachers"]["code"]["teacher_logprobs"] is CODE.logprobs


async def test_a_token_that_one_of_them_does_not_know_is_taught_by_the_other(model):
    blind = msgspec.structs.replace(MATH, valid=np.array([True, False, True]))
    given = ScriptedStages(generation([5, 6, 1], STUDENT), teachers={"math": blind, "code": CODE})
    given.teachers = SHARES
    found = await sample(OpdPolicy, given)
    expected = 0.75 * np.where(blind.valid, MATH.logprobs - STUDENT, 0) + 0.25 * (CODE.logprobs - STUDENT)
    np.testing.assert_allclose(loss_of([found], model).advantages[0], expected, rtol=1e-6)
    assert found.metrics["teacher/math/masked"] == pytest.approx(1 / 3)


async def test_eopds_gate_is_each_teachers_own():
    found = await sample(EopdPolicy, top_k=2)
    math, code = found.supervision.soft_targets
    assert (math.positions.tolist(), code.positions.tolist()) == ([1], [0, 1])
    np.testing.assert_allclose([math.weights[0], code.weights[0]], [0.75 / 3, 0.25 / 3])
    assert found.metrics["eopd/gated"] == pytest.approx(0.75 / 3 + 0.25 * 2 / 3)
    assert found.record["gated_positions"].tolist() == [0, 1]


async def test_distill_compares_and_pulls_by_their_shares(model):
    found = await sample(DistillPolicy, divergence="forward_kl", top_k=2, weight=2.0, pull=0.5)
    math, code = found.supervision.soft_targets
    np.testing.assert_allclose([math.weights.sum(), code.weights.sum()], [1.5, 0.5], rtol=1e-6)
    assert (math.token_ids[0].tolist(), code.token_ids[0].tolist()) == ([5, 7], [6, 7])
    expected = 0.5 * (0.75 * MATH.logprobs + 0.25 * CODE.logprobs - STUDENT)
    np.testing.assert_allclose(loss_of([found], model).advantages[0], expected, rtol=1e-5)


async def test_kd_draws_who_writes_by_the_shares_and_all_score():
    written = {"math": 0, "code": 0}
    for prompt in simulated_prompts(400, problems=400):
        given = stages()
        found = await sample(KdPolicy, given, prompt, top_k=2)
        writer = given.teachers_asked[0]
        written[writer] += 1
        assert set(given.teachers_asked[1:]) == {"math", "code"}
        assert found.metrics[f"teacher/{writer}/tokens"] == 3.0
        weights = [each.weights.sum() for each in found.supervision.soft_targets]
        np.testing.assert_allclose(weights, [0.5, 0.375, 0.125], rtol=1e-6)
    assert 260 < written["math"] < 340  # 300 of 400, with five standard errors on both sides


def of_domain(prompt, domain, teacher):
    problem = msgspec.structs.replace(prompt.problem, domain=domain, teacher=teacher)
    return msgspec.structs.replace(prompt, problem=problem)


async def test_a_routed_method_asks_one_and_an_imbalance_between_domains_is_said():
    samples = []
    for number, prompt in enumerate(simulated_prompts(40, problems=40)):
        domain, teacher, scores = ("algebra", "math", MATH) if number % 2 else ("python", "code", CODE)
        right = Verdict.CORRECT if number % 4 == 1 or number % 8 == 0 else Verdict.WRONG
        given = ScriptedStages(generation([5, 6, 1], STUDENT), teachers={teacher: scores}, verdict=right)
        policy = make_policy(OpdPolicy, policy_context())  # as in a run with a route
        samples += await policy.supervise(of_domain(prompt, domain, teacher), given)
    assert all(each.supervision.pulls[0].weights is None for each in samples)
    assert [each.record["domain"] for each in samples[:2]] == ["python", "algebra"]
    means, outcomes = mean_metrics(each.metrics for each in samples), outcome_metrics(samples)
    assert (means["rollout/algebra/accuracy"], means["rollout/python/accuracy"]) == (0.5, 0.25)
    assert accuracy_words(means) == "accuracy 37.5 %"
    assert domain_words(means) == (
        "python 25.0 %, algebra 50.0 %, code: entropy 1.37, pull +0.08, math: entropy 0.73, pull -0.17"
    )
    assert {name.split("/")[1] for name in outcomes} == {"math", "code"}
    assert outcomes["teacher/math/right_responses"] == 10.0
    assert slope_words(outcomes).startswith("teacher code to right answers ")
    code, math = outcome_words([{"iteration": 1, **outcomes}] * 3).split("; ", 2)[::2]
    assert code.startswith("teacher code does not clearly point to right answers")
    assert math.startswith("whether teacher math points to right answers is not known")
