"""The log pi_old of training: served or recomputed, and how far the two differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from makers import MakeModel, MakeTrainer
from transformers import AutoModelForCausalLM

from spot_async.trainer.messages import Batch
from spot_async.types import Pull, Supervision, WeightVersion

VOCAB = 30


@pytest.fixture(scope="module")
def student(random_model: MakeModel) -> Path:
    return random_model(vocab_size=VOCAB, tie_word_embeddings=False, initializer_range=0.2)


def batch_of(student: Path, *, given_advantages: bool = False) -> list[Supervision]:
    """Eight trajectories with the student's own log-probabilities, as a server without error serves them."""
    model = AutoModelForCausalLM.from_pretrained(student).eval()
    samples = []
    for ordinal in range(8):
        draw = np.random.default_rng(ordinal)
        prompt = draw.integers(0, VOCAB, 3 + ordinal % 3).astype(np.int32)
        response = draw.integers(0, VOCAB, 4 + 2 * ordinal).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.tolist(), *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
        served = logits.log_softmax(-1)[range(len(response)), response].numpy()
        other = (served + draw.normal(0.0, 1.0, len(response))).astype(np.float32)
        samples.append(
            Supervision(
                prompt_ordinal=ordinal,
                problem_id=f"p{ordinal}",
                prompt_ids=prompt,
                response_ids=response,
                behavior_logprobs=served,
                version=WeightVersion(0, 0),
                pulls=() if given_advantages else (Pull(logprobs=other),),
                advantages=other if given_advantages else None,
            )
        )
    return samples


def off_by(samples: list[Supervision], differences: list[np.ndarray[Any, Any]]) -> list[Supervision]:
    return [
        msgspec.structs.replace(sample, behavior_logprobs=(sample.behavior_logprobs + d).astype(np.float32))
        for sample, d in zip(samples, differences, strict=True)
    ]


def noise(samples: list[Supervision], scale: float) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(99)
    return [draw.normal(0.0, scale, len(sample.response_ids)) for sample in samples]


Train = Callable[..., tuple[dict[str, float], torch.Tensor]]


@pytest.fixture
def train(student_trainer: MakeTrainer) -> Train:
    """Metrics of one iteration, and all weights after it."""

    def run(name: str, samples: list[Supervision], **training: Any) -> Any:
        trainer = student_trainer(name, **{"mini_batch_size": 2, **training})
        metrics = trainer.train(Batch(0, tuple(samples))).metrics
        return metrics, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    return run


@pytest.mark.parametrize("given_advantages", [False, True])
def test_recomputed_equals_served_where_the_server_makes_no_error(
    student: Path, train: Train, given_advantages: bool
) -> None:
    samples = batch_of(student, given_advantages=given_advantages)
    served, served_weights = train("served", samples)
    recomputed, weights = train("recomputed", samples, behavior="recomputed")
    for name in ("loss", "advantage_mean", "ratio_mean", "behavior_kl", "grad_norm"):
        assert recomputed[name] == pytest.approx(served[name], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights, served_weights, rtol=0, atol=2e-5)
    for metrics in (served, recomputed):
        assert metrics["mismatch_max"] < 1e-5


def test_recomputed_training_does_not_depend_on_what_was_served(student: Path, train: Train) -> None:
    samples = batch_of(student)
    _, expected = train("right", samples, behavior="recomputed")
    wrong = off_by(samples, noise(samples, 0.5))
    _, weights = train("wrong", wrong, behavior="recomputed")
    assert torch.equal(weights, expected)  # advantages follow from the recomputed ones, too
    _, weights = train("served", wrong)
    assert not torch.allclose(weights, expected, atol=1e-4)


def test_the_mismatch_is_reported_in_both_modes(student: Path, train: Train) -> None:
    samples = batch_of(student)
    differences = noise(samples, 0.3)
    off = off_by(samples, differences)
    whole = np.concatenate(differences)
    metrics, _ = train("recomputed", off, behavior="recomputed")
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(whole).mean(), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(whole).max(), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(-whole) - 1 + whole).mean(), rel=1e-4)

    # Served: the first update's training pass still has the old weights, here that of the whole batch.
    metrics, _ = train("one", off, mini_batch_size=8)
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(whole).mean(), rel=1e-4)
    # With four updates only the first one's trajectories are compared: later weights would count as mismatch.
    metrics, _ = train("four", samples, learning_rate=0.1)
    assert metrics["mismatch_max"] < 1e-5 < metrics["behavior_kl"]
