"""Tokens that older weights sampled: their lag, how far they are from the trained policy, and their weight in the loss.

The reference computes everything in float64 from full logits of the weights that sampled and of those in training. It
shares no code with the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from dense_rows import dense_row_loss
from makers import MakeModel, MakeSample, MakeTrainer
from transformers import AutoModelForCausalLM

from spot_async.trainer.messages import Batch
from spot_async.types import Pull, SoftTargets, Supervision, VersionSpan, WeightVersion

VOCAB = 30
LIVE, OLDEST = 5, 3  # steps of the weights in training and of the oldest that sampled
CAP = 2.0
OFF_NATS = 0.05  # by which the server's log-probabilities differ from the exact ones


@pytest.fixture(scope="module")
def weights(random_model: MakeModel) -> dict[int, Path]:
    """The student's directory at each step: three random models."""
    return {
        step: random_model(vocab_size=VOCAB, tie_word_embeddings=False, initializer_range=0.2, seed=step)
        for step in range(OLDEST, LIVE + 1)
    }


@pytest.fixture(scope="module")
def models(weights: dict[int, Path]) -> dict[int, Any]:
    return {
        step: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for step, path in weights.items()
    }


def rows_under(model: Any, sample: Supervision) -> torch.Tensor:
    """(T, V) log-probabilities after each prefix of the response."""
    prompt, response = sample.prompt_ids.tolist(), sample.response_ids.tolist()
    rows: torch.Tensor = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows


def logprobs_under(model: Any, sample: Supervision) -> torch.Tensor:
    """(T,) log-probabilities of the response's tokens."""
    return rows_under(model, sample)[range(len(sample.response_ids)), sample.response_ids.tolist()]


def steps_of(sample: Supervision) -> np.ndarray[Any, Any]:
    return np.concatenate([np.full(span.end - span.start, span.version.step) for span in sample.version_spans])


def branch(ordinal: int) -> SoftTargets:
    """Return targets less a baseline. No version of the student has a part in them."""
    draw = np.random.default_rng(100 + ordinal)
    cells, less = draw.dirichlet(np.ones(4), (2, 2)).astype(np.float32)
    ids = np.array([draw.permutation(VOCAB)[:4] for _ in range(2)], np.int32)
    at, weights = np.array([5, 0], np.int32), draw.uniform(0.1, 1.0, 2).astype(np.float32)
    return SoftTargets(positions=at, token_ids=ids, probabilities=cells, weights=weights, baselines=0.3 * less)


def sampled_in_flight(models: dict[int, Any], *, given_advantages: bool) -> list[Supervision]:
    """Six responses during which weights were replaced 0, 1 or 2 times; one token of each has no known advantage."""
    samples = []
    for ordinal in range(6):
        draw = np.random.default_rng(ordinal)
        tokens = 6 + 2 * ordinal
        cuts = sorted(draw.choice(np.arange(1, tokens), ordinal % 3, replace=False).tolist())
        steps = [LIVE, LIVE - 1, OLDEST][: len(cuts) + 1][::-1]
        spans = tuple(
            VersionSpan(start, end, WeightVersion(0, step))
            for start, end, step in zip([0, *cuts], [*cuts, tokens], steps, strict=True)
        )
        advantages = draw.normal(0.0, 1.0, tokens).astype(np.float32)
        sample = Supervision(
            prompt_ordinal=ordinal,
            problem_id=f"p{ordinal}",
            prompt_ids=draw.integers(0, VOCAB, 3).astype(np.int32),
            response_ids=draw.integers(0, VOCAB, tokens).astype(np.int32),
            behavior_logprobs=np.zeros(tokens, np.float32),
            version=min(span.version for span in spans),
            version_spans=spans,
            policy_mask=np.arange(tokens) != 1,
            soft_targets=(branch(ordinal),),
            advantages=advantages if given_advantages else None,
            pulls=() if given_advantages else (Pull(logprobs=advantages - 3),),
        )
        with torch.no_grad():
            exact = {step: logprobs_under(model, sample).numpy() for step, model in models.items()}
        served = np.array([exact[step][t] for t, step in enumerate(steps_of(sample))])
        served = (served + draw.normal(0.0, OFF_NATS, tokens)).astype(np.float32)
        samples.append(msgspec.structs.replace(sample, behavior_logprobs=served))
    return samples


def known(samples: Sequence[Supervision], values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """All samples' values (T,) in a row, where the advantage is known."""
    return np.concatenate([np.asarray(v)[s.policy_mask] for s, v in zip(samples, values, strict=True)])


@pytest.mark.parametrize("given_advantages", [True, False])
def test_loss_and_gradient_weigh_each_token_by_the_version_that_sampled_it(
    weights: dict[int, Path],
    models: dict[int, Any],
    make_trainer: MakeTrainer,
    tmp_path: Path,
    given_advantages: bool,
) -> None:
    samples = sampled_in_flight(models, given_advantages=given_advantages)
    model = models[LIVE]
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    weighed = []
    for sample in samples:
        own = logprobs_under(model, sample)
        prox = own.detach()
        ratio = (own - prox).exp()  # of value 1: the trust region starts at the iteration's first weights
        weight = (prox - torch.tensor(sample.behavior_logprobs).double()).exp().clamp(max=CAP)
        given = sample.advantages if given_advantages else sample.pulls[0].logprobs
        advantage = torch.tensor(given).double() - (0 if given_advantages else prox)
        mask = torch.tensor(sample.policy_mask)
        weighed.append(weight[mask])
        loss = loss - (weight * ratio * advantage * mask).sum() / len(own) / len(samples)
        (targets,), rows = sample.soft_targets, rows_under(model, sample)
        for n, position in enumerate(targets.positions.tolist()):
            loss = loss + float(targets.weights[n]) * dense_row_loss(rows[position], targets, n) / len(samples)
    loss.backward()
    weights_of_tokens = torch.cat(weighed)
    is_capped = (weights_of_tokens == CAP).double()
    assert 0 < is_capped.mean() < 1

    trainer = make_trainer(weights[LIVE], tmp_path, behavior="recomputed", importance_cap=CAP, max_grad_norm=1e9)
    metrics = trainer.train(Batch(LIVE, tuple(samples))).metrics

    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["importance_weight_mean"] == pytest.approx(weights_of_tokens.mean().item(), rel=1e-4)
    assert metrics["importance_capped"] == pytest.approx(is_capped.mean().item(), abs=1e-6)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.sqrt(sum((g**2).sum() for g in expected.values())).item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-4, atol=2e-6 * norm)


@pytest.mark.parametrize("behavior", ["served", "recomputed"])
def test_lag_is_counted_per_token_and_parts_staleness_from_the_servers_mismatch(
    weights: dict[int, Path], models: dict[int, Any], make_trainer: MakeTrainer, tmp_path: Path, behavior: str
) -> None:
    samples = sampled_in_flight(models, given_advantages=True)
    trainer = make_trainer(weights[LIVE], tmp_path, behavior=behavior, micro_batch_tokens=40)
    metrics = trainer.train(Batch(LIVE, tuple(samples))).metrics

    lags = LIVE - np.concatenate([steps_of(sample) for sample in samples])
    assert metrics["lag_mean"] == pytest.approx(lags.mean())  # also of tokens without a known advantage
    assert metrics["lag_max"] == LIVE - OLDEST
    with torch.no_grad():
        own = known(samples, [logprobs_under(models[LIVE], sample).numpy() for sample in samples])
    differences = own - known(samples, [sample.behavior_logprobs for sample in samples])
    is_stale = known(samples, [steps_of(sample) for sample in samples]) < LIVE
    for name, some in (("mismatch", differences[~is_stale]), ("staleness", differences[is_stale])):
        assert metrics[f"{name}_mean"] == pytest.approx(np.abs(some).mean(), rel=1e-4)
        assert metrics[f"{name}_max"] == pytest.approx(np.abs(some).max(), rel=1e-4)
        assert metrics[f"{name}_kl"] == pytest.approx((np.expm1(some) - some).mean(), rel=1e-3)
    assert metrics["mismatch_max"] < 5 * OFF_NATS < metrics["staleness_max"]
    weight = np.exp(differences)
    effective = weight.sum() ** 2 / (weight**2).sum() / len(weight)
    assert metrics["effective_sample_share"] == pytest.approx(effective, rel=1e-4)


def test_without_spans_all_tokens_are_of_the_version_and_without_a_version_of_no_student(
    weights: dict[int, Path], make_trainer: MakeTrainer, supervision: MakeSample, tmp_path: Path
) -> None:
    """A policy of a user's own may give `version` only."""
    given = [msgspec.structs.replace(supervision(n, 4 + n), prompt_ids=np.ones(2, np.int32)) for n in range(3)]
    old, live, none = (
        msgspec.structs.replace(each, response_ids=each.response_ids % VOCAB, version=version)
        for each, version in zip(given, [WeightVersion(0, 1), WeightVersion(0, 2), None], strict=True)
    )
    metrics = make_trainer(weights[LIVE], tmp_path).train(Batch(2, (old, live, none))).metrics
    assert metrics["lag_mean"] == pytest.approx(4 / (4 + 5))
    assert metrics["lag_max"] == 1
