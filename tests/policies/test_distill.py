"""`policy.kind: distill`: keys that compose terms, and what they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from spot_async.policies.distill import PRESETS, DistillPolicy, DistillSettings
from spot_async.policies.opd import OpdPolicy
from spot_async.testing import (
    ScriptedStages,
    generation,
    loss_of,
    make_policy,
    make_run,
    policy_context,
    simulated_prompts,
    simulated_run,
    token_scores,
)
from spot_async.testing.services import VOCAB_SIZE, Latency, SimulatedTeacher
from spot_async.types import Divergence, ScoreRequest, Supervision


def trained(**settings: Any) -> list[Supervision]:
    return simulated_run(make_policy(DistillPolicy, **settings), iterations=2).trained


def test_without_keys_it_is_opd() -> None:
    for ours, theirs in zip(trained(), simulated_run(make_policy(OpdPolicy), iterations=2).trained, strict=True):
        assert ours.soft_targets == ()
        assert ours.pulls[0].logprobs.tobytes() == theirs.pulls[0].logprobs.tobytes()
        assert ours.pulls[0].weights is None


@pytest.mark.parametrize(
    ("keys", "divergence"),
    [
        ({"divergence": "forward_kl", "clip": 0.05}, Divergence(forward=1.0, clip=0.05)),
        ({"divergence": "reverse_kl"}, Divergence(reverse=1.0)),
        (
            {"divergence": "jsd", "beta": 0.25},
            Divergence(forward=0.25, reverse=0.75, forward_skew=0.25, reverse_skew=0.75),
        ),
        (
            {"divergence": "skew", "beta": 0.1, "tail": "conditional"},
            Divergence(forward=1.0, forward_skew=0.1, is_conditional=True),
        ),
    ],
)
def test_a_divergence_compares_the_teachers_top_k_at_every_token(keys: dict[str, Any], divergence: Divergence) -> None:
    for each in trained(**keys, top_k=5, weight=2.0):
        (rows,) = each.soft_targets
        tokens = len(each.response_ids)
        assert each.pulls == ()
        assert rows.divergence == divergence
        assert rows.token_ids.shape == (tokens, 5)
        assert rows.weights == pytest.approx(np.full(tokens, 2.0 / tokens))
        assert (rows.tails is None) == divergence.is_conditional


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_model(vocab_size=VOCAB_SIZE))


def test_a_reward_and_a_pull_stand_side_by_side_and_responses_of_a_prompt_are_compared(model: Any) -> None:
    run = simulated_run(
        make_policy(DistillPolicy, pull=0.5, pull_clip=[-1.0, 1.0], reward=2.0, samples=4), iterations=1
    )
    by_prompt: dict[int, list[Supervision]] = {}
    for each in run.trained:
        by_prompt.setdefault(each.prompt_ordinal, []).append(each)
    assert {len(group) for group in by_prompt.values()} == {4}
    for group in by_prompt.values():
        given = [each.advantages[0] for each in group if each.advantages is not None]
        assert sum(given) == pytest.approx(0.0, abs=1e-4)
        for each, advantages in zip(group, loss_of(group, model).advantages, strict=True):
            difference = np.clip(each.pulls[0].logprobs - each.behavior_logprobs, -1, 1)
            assert each.advantages is not None
            assert advantages == pytest.approx(each.advantages + 0.5 * difference, abs=1e-5)
    assert any(each.advantages is not None and each.advantages.any() for each in run.trained)
    for record in (sample.record for sample in run.samples):  # as GRPO's, so that `inspect` shows it
        assert record["reward"] == record["group_rewards"][record["sample"]]
        assert len(record["group_rewards"]) == 4


def test_a_difference_clipped_to_one_number_is_a_fixed_advantage_whatever_the_teacher_says(model: Any) -> None:
    for advantages in loss_of(trained(pull_clip=[-1.0, -1.0]), model).advantages:
        assert advantages == pytest.approx(np.full(len(advantages), -1.0))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_students_own_top_k_is_what_is_compared_where_its_support_is_asked_for(max_staleness: int) -> None:
    policy = make_policy(DistillPolicy, divergence="reverse_kl", support="student", top_k=3)
    assert policy.needs.rounds == 2, "what the watchdog allows for: the student is asked for its rows, then the teacher"
    run = simulated_run(policy, iterations=3, batch_size=4, max_staleness=max_staleness)
    assert run.stages.teacher().score.counters.completed == 2 * len(run.trained) == 24
    teacher = SimulatedTeacher(Latency(0.0, 0.0))
    for each in run.trained:
        whole = np.exp(asyncio.run(teacher._rows(ScoreRequest(each.prompt_ids, each.response_ids, 1.0, 0.0))))
        (rows,) = each.soft_targets
        assert rows.token_ids.shape == (len(each.response_ids), 3)
        expected = np.take_along_axis(whole, rows.token_ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(rows.probabilities, expected, rtol=1e-5)
        np.testing.assert_allclose(rows.tails, 1.0 - expected.sum(axis=1), rtol=1e-4)


def test_the_teacher_writes_the_share_that_the_student_does_not_whatever_the_order_of_prompts() -> None:
    keys = {"divergence": "jsd", "student_share": 0.5, "pull": 1.0}
    first, again = trained(**keys), trained(**keys)
    writers = {each.prompt_ordinal: each.version is None for each in first}
    assert writers == {each.prompt_ordinal: each.version is None for each in again}
    assert 0.3 < np.mean([*writers.values()]) < 0.7
    for each in first:
        if each.version is None:
            assert each.policy_mask is not None
            assert not each.policy_mask.any()
            assert len(each.soft_targets[0].positions) == len(each.response_ids)


def test_responses_of_the_data_are_learnt_from_without_asking_the_student() -> None:
    policy = make_policy(DistillPolicy, divergence="forward_kl", student_share=0.0, written_by="data")
    assert policy.needs.written_responses
    assert policy.needs.teacher_responses == 0
    assert not make_policy(DistillPolicy, divergence="forward_kl", student_share=0.0).needs.written_responses

    class Written(ScriptedStages):
        rollout = teacher_response = None  # type: ignore[assignment]

    stages = Written(generation([5, 6, 7]), token_scores([-0.5, -0.5, -2.0], topk_logprobs=-0.5))
    (sample,) = asyncio.run(policy.supervise(next(simulated_prompts()), stages))
    assert sample.supervision.response_ids.tolist() == [5, 6, 7]
    assert sample.supervision.version is None
    assert len(sample.supervision.soft_targets[0].positions) == 3


@pytest.mark.parametrize("preset", [*PRESETS])
def test_a_preset_is_the_keys_that_it_stands_for_and_keys_beside_it_count(preset: str) -> None:
    with_preset = DistillSettings(preset=preset)  # type: ignore[arg-type]
    assert with_preset.model_copy(update={"preset": None}) == DistillSettings(**PRESETS[preset])
    assert DistillSettings(preset=preset, weight=0.25).weight == 0.25  # type: ignore[arg-type]
    run = make_run(make_policy(DistillPolicy, policy_context(), preset=preset), iterations=1).finish()
    assert len(run.trained) > 0


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"reward": 1.0}, r"reward=1 compares a prompt's responses: set samples to 2 or more"),
        ({"pull": 0.0}, r"nothing would be learnt: give a divergence, a pull or a reward"),
        ({"student_share": 0.5}, r"student_share=0\.5: tokens of others have no pull.*: set divergence"),
        ({"divergence": "reverse_kl", "tail": False}, r"infinite, since the student has other tokens too"),
        (
            {"divergence": "jsd", "temperature": 2.0},
            r"temperature=2 is exact over the whole vocabulary only: set support=whole and tail=conditional",
        ),
        ({"divergence": "jsd", "beta": 1.0}, r"less than 1"),
    ],
)
def test_keys_that_mean_nothing_are_refused_in_one_line(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        DistillSettings(**keys)


def test_whole_vocabularies_are_compared_at_a_temperature_of_the_loss() -> None:
    policy = make_policy(DistillPolicy, divergence="jsd", support="whole", tail="conditional", temperature=2.0)
    assert policy.needs.teacher_top_k == policy_context().vocab_size
    assert policy.needs.teacher_top_k_key == "support"


def test_a_run_with_a_reference_kl_asks_the_reference_about_every_response() -> None:
    policy = make_policy(DistillPolicy, policy_context(reference_kl=True), divergence="jsd", student_share=0.5)
    trained = simulated_run(policy, iterations=1).trained
    assert len({each.version is None for each in trained}) == 2
    for each in trained:
        assert each.reference_logprobs is not None
        assert len(each.reference_logprobs) == len(each.response_ids)
