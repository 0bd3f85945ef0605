"""Tests of ConfidentOpd on chosen numbers, and in a whole run. They start no server, and none needs a GPU."""

import asyncio

import numpy as np
import pytest
from confident_opd import ConfidentOpd
from transformers import Qwen3Config, Qwen3ForCausalLM

from spot_async import WeightVersion
from spot_async.testing import (
    ScriptedStages,
    generation,
    loss_of,
    make_policy,
    simulated_prompts,
    simulated_run,
    token_scores,
)

MODEL = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1))


def test_a_token_teaches_nothing_where_the_teacher_is_not_sure() -> None:
    stages = ScriptedStages(
        generation([5, 6, 7], logprobs=[-1.0, -1.0, -1.0]),
        token_scores([-0.5, -0.5, -2.0], entropy=[0.1, 2.0, 0.4]),
    )
    policy = make_policy(ConfidentOpd, max_entropy_nats=0.5)
    (sample,) = asyncio.run(policy.supervise(next(simulated_prompts()), stages))
    assert loss_of([sample], MODEL).advantages[0].tolist() == [0.5, 0.0, -1.0]
    assert sample.metrics["confident_opd/sure"] == pytest.approx(2 / 3)
    assert stages.verified == [(5, 6, 7)]


def test_a_token_that_the_teacher_could_not_be_asked_about_teaches_nothing() -> None:
    scores = token_scores([-0.5, -0.5, -2.0], entropy=[0.1, 0.0, 0.4], valid=np.array([True, False, True]))
    stages = ScriptedStages(generation([5, 6, 7], logprobs=[-1.0, -1.0, -1.0]), scores)
    (sample,) = asyncio.run(make_policy(ConfidentOpd).supervise(next(simulated_prompts()), stages))
    assert loss_of([sample], MODEL).advantages[0].tolist() == [0.5, 0.0, -1.0]
    assert sample.supervision.policy_mask.tolist() == [True, False, True]
    assert sample.metrics["teacher/masked"] == pytest.approx(1 / 3)


def test_a_run_trains_on_every_prompt_once() -> None:
    run = simulated_run(make_policy(ConfidentOpd), iterations=3, batch_size=8)
    assert [each.prompt_ordinal for each in run.trained] == list(range(3 * 8))
    assert all(each.version == WeightVersion(0, 2) for each in run.batches[2])  # the weights of the second update
