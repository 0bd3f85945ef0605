"""`loss_of`: held to dense float64, and to what a trainer says of the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from makers import DenseLoss, MakeSample, MakeTrainer, MixedBatch
from recipes import recipe
from transformers import AutoModelForCausalLM

import spot_async
from spot_async.config import TrainingConfig
from spot_async.errors import TrainerError
from spot_async.testing import live_batch, loss_of, make_policy, make_verifier, simulated_run
from spot_async.trainer.messages import Batch
from spot_async.types import Judgement, Sample, Verdict
from spot_async.verification import BoxedMatch


@pytest.mark.parametrize("choices", [{}, {"micro_batch_tokens": 30}, {"loss_aggregation": "token_mean"}], ids=str)
def test_loss_and_gradient_are_those_of_a_dense_model(
    student: Path, mixed_batch: MixedBatch, dense_loss: DenseLoss, choices: dict[str, Any]
) -> None:
    training = TrainingConfig(iterations=1, reference_kl=0.1, dual_clip=3.0, **choices)
    model = AutoModelForCausalLM.from_pretrained(student)
    found = loss_of(mixed_batch(), model, training=training, temperature=0.8)
    reference = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    loss = dense_loss(reference, mixed_batch(), training, 0.8)
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=2e-6)
    assert found.loss == pytest.approx(found.policy + found.branch + found.reference + found.entropy, rel=1e-5)
    assert min(abs(each) for each in (found.policy, found.branch, found.reference, found.entropy)) > 0
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        off = (torch.from_numpy(found.gradient[name]).double() - parameter.grad).norm() / parameter.grad.norm()
        assert off < 1e-5, name
    norms = [float(each.grad.norm()) for each in reference.parameters() if each.grad is not None]
    assert found.grad_norm == pytest.approx(np.linalg.norm(norms), rel=1e-5)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("normalize", [False, True])
def test_what_it_weighs_is_what_a_trainer_weighs(
    student: Path, student_trainer: MakeTrainer, mixed_batch: MixedBatch, normalize: bool
) -> None:
    """Log pi_old is recomputed, far from what the samples say, so weights are capped and advantages are others."""
    choices: dict[str, Any] = {
        "behavior": "recomputed",
        "importance_cap": 2.0,
        "normalize_advantages": normalize,
        "batch_size": 8,
        "mini_batch_size": 8,
    }
    batch = mixed_batch()
    found = loss_of(
        batch, AutoModelForCausalLM.from_pretrained(student), training=TrainingConfig(iterations=1, **choices)
    )
    metrics = student_trainer(**choices).train(Batch(0, tuple(batch))).metrics
    for name, value in (("loss", found.loss), ("loss_branch", found.branch), ("grad_norm", found.grad_norm)):
        assert value == pytest.approx(metrics[name], rel=1e-5)
    where = [
        each.policy_mask if each.policy_mask is not None else np.full(len(each.response_ids), each.has_policy_term)
        for each in batch
    ]
    of_policy = np.concatenate([weights[own] for weights, own in zip(found.importance_weights, where, strict=True)])
    assert of_policy.mean() == pytest.approx(metrics["importance_weight_mean"], rel=1e-5)
    assert {1.0} < set(np.concatenate(found.importance_weights).tolist())
    expected = []
    for sample, live, own in zip(batch, found.live, where, strict=True):
        total = np.zeros(len(own)) if sample.advantages is None else sample.advantages
        for pull in sample.pulls:
            total = total + np.clip(pull.logprobs - live.logprobs, *(pull.clip or (-np.inf, np.inf)))
        expected.append(np.where(own, total, 0))
    if normalize:
        drawn = np.concatenate([each[own] for each, own in zip(expected, where, strict=True)])
        expected = [
            np.where(own, (each - drawn.mean()) / drawn.std(), 0) for each, own in zip(expected, where, strict=True)
        ]
    for advantages, by_hand in zip(found.advantages, expected, strict=True):
        np.testing.assert_allclose(advantages, by_hand, atol=2e-5)


def test_a_live_batch_has_the_samples_with_supervision_and_what_a_student_says_of_them() -> None:
    samples: list[Sample] = simulated_run(make_policy(recipe("tip")), iterations=1, batch_size=4).samples
    left_out = msgspec.structs.replace(samples[1], supervision=None)
    batch = live_batch([samples[0], left_out, *samples[2:]], iteration=3, progress=0.75)
    assert [each.supervision for each in batch.samples] == [
        samples[0].supervision,
        *(s.supervision for s in samples[2:]),
    ]
    assert [len(each.entropy) for each in batch.live] == [len(s.supervision.response_ids) for s in batch.samples]
    assert (batch.iteration, batch.progress) == (3, 0.75)
    assert make_policy(recipe("tip")).revise(batch)


def test_a_sample_that_cannot_be_trained_is_refused_by_its_name(student: Path, supervision: MakeSample) -> None:
    model = AutoModelForCausalLM.from_pretrained(student)
    with pytest.raises(TrainerError, match=r"'problem-3' .* cannot be trained: .*advantages"):
        loss_of([supervision(3, 4, advantages=np.zeros(5, np.float32))], model)


async def test_a_verifier_is_made_without_its_kind() -> None:
    problem = spot_async.Problem(id="p", text="", answer="3")
    async with make_verifier(BoxedMatch) as verifier:
        found = await verifier.verify(problem, r"\boxed{3}", deadline=60.0)
    assert (found.verdict if isinstance(found, Judgement) else found) is Verdict.CORRECT
