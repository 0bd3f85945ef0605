"""Pulls and targets against dense float64 softmaxes, and the laws of their sum (docs/methods.md)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from dense_rows import dense_row_loss
from hypothesis import given
from hypothesis import strategies as st
from makers import DenseLoss, MakeSample, MakeTrainer
from transformers import AutoModelForCausalLM

import spot_async.trainer.model
from spot_async.terms import compared, forward_kl, jsd, pull, reverse_kl, reverse_skew, skew, soft_targets
from spot_async.testing import token_scores
from spot_async.testing.services import whole_scores
from spot_async.trainer.batching import MicroBatch, collate
from spot_async.trainer.divergence import Cells, divergence_statistics, soft_target_losses
from spot_async.trainer.messages import Batch
from spot_async.trainer.model import Block, selected_logprobs
from spot_async.types import Divergence, Pull, SoftTargets, Supervision

VOCAB = 50
KINDS = {
    "cross-entropy": None,
    "forward": forward_kl(),
    "reverse": reverse_kl(),
    "jsd": jsd(0.3),
    "skew": skew(0.1),
    "reverse skew": reverse_skew(0.2),
    "mixture": Divergence(forward=0.4, reverse=1.3),
    "clipped forward": forward_kl(clip=0.05),
    "clipped jsd": jsd(0.5, clip=0.02),
}


def model_logprobs(positions: int, seed: int, spread: float = 2.0) -> np.ndarray[Any, Any]:
    """Return a teacher's log-probabilities (N, V)."""
    logits = torch.tensor(np.random.default_rng(seed).normal(0, spread, (positions, VOCAB)))
    found: np.ndarray[Any, Any] = logits.log_softmax(-1).numpy()
    return found


def rows_of(kind: Divergence | None, support: str, positions: list[int], seed: int = 0) -> SoftTargets:
    """Return targets of a teacher: on its top-k with a tail, on these alone and conditional, or on all tokens."""
    teacher = model_logprobs(len(positions), seed)
    k = VOCAB if support == "whole" else 6
    ids = np.argsort(-teacher, axis=1)[:, :k].astype(np.int32)
    is_conditional = support != "tail"
    if kind is not None and is_conditional:
        kind = msgspec.structs.replace(kind, is_conditional=True)
    weights = np.random.default_rng(seed).uniform(0.1, 1.0, len(positions))
    raw = np.take_along_axis(teacher, ids, axis=1)
    return soft_targets(positions, ids, raw, weights, kind, has_tail=not is_conditional)


def with_baseline(targets: SoftTargets, alpha: float) -> SoftTargets:
    """Return targets less a share of another distribution, which is above some of them."""
    others = np.random.default_rng(1).dirichlet(np.ones(targets.token_ids.shape[1]), len(targets.positions))
    return msgspec.structs.replace(targets, baselines=(alpha * others).astype(np.float32))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows_per_block", [3, 1000])
def test_value_and_gradient_are_those_of_dense_softmaxes_whatever_the_kind_and_support(
    student: Path,
    student_trainer: MakeTrainer,
    supervision: MakeSample,
    dense_loss: DenseLoss,
    monkeypatch: pytest.MonkeyPatch,
    packing: bool,
    rows_per_block: int,
) -> None:
    """All kinds on all supports in one batch, of mixed widths, with repeated positions and several pulls."""
    monkeypatch.setattr(spot_async.trainer.model, "LOGITS_PER_BLOCK", VOCAB * rows_per_block)
    batch = []
    for ordinal, (name, kind) in enumerate(KINDS.items()):
        tokens = 4 + ordinal
        targets = [
            rows_of(kind, "tail", [2, 0, 2], ordinal),
            rows_of(kind, "conditional", [1, 3], 20 + ordinal),
            rows_of(kind, "whole", [3], 40 + ordinal),
        ]
        if name == "cross-entropy":  # in a micro-batch with divergences, of which it is none
            targets += [with_baseline(rows_of(None, "whole", [3, 0, 3], 70), alpha) for alpha in (0.5, 1.0)]
        if name == "forward":
            targets.append(rows_of(forward_kl(temperature=2.0), "whole", [1], 60))
        draw = np.random.default_rng(ordinal)
        sample = supervision(ordinal, tokens, *targets, advantages=draw.normal(size=tokens).astype(np.float32))
        second = Pull(
            logprobs=(sample.behavior_logprobs + draw.normal(size=tokens)).astype(np.float32),
            weights=draw.normal(size=tokens).astype(np.float32),
            clip=(-0.5, np.inf),
        )
        batch.append(msgspec.structs.replace(sample, pulls=(*sample.pulls, second)[: ordinal % 3]))
    trainer = student_trainer(packing=packing, batch_size=16, mini_batch_size=16, max_grad_norm=1e9)
    metrics = trainer.train(Batch(0, tuple(batch))).metrics
    reference = AutoModelForCausalLM.from_pretrained(student).double().eval()
    loss = dense_loss(reference, batch, trainer._training, 1.0)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert metrics["clipped_cells"] > 0
    of_dense = {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}
    for name, parameter in trainer.model.named_parameters():
        expected = of_dense[name]
        off = (parameter.grad.double() - expected).norm() / expected.norm().clamp(min=1e-8)
        assert off < 1e-5, name


def whole_divergence(kind: Divergence, p: torch.Tensor, log_q: torch.Tensor) -> float:
    ids = np.arange(VOCAB, dtype=np.int32)[None]
    conditional = msgspec.structs.replace(kind, is_conditional=True)
    return loss_of(soft_targets([0], ids, p.log().numpy()[None], [1.0], conditional, has_tail=False), log_q)


def batch_of(*targets: SoftTargets) -> MicroBatch:
    tokens = 1 + max(int(each.positions.max()) for each in targets)
    sample = Supervision(
        prompt_ordinal=0,
        problem_id="p",
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(tokens, np.int32),
        behavior_logprobs=np.zeros(tokens, np.float32),
        version=None,
        soft_targets=targets,
    )
    return collate([sample], is_packed=False)


def met_by(targets: SoftTargets, log_q: torch.Tensor) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """Return targets as a batch, and what a student of log-probabilities (V,) everywhere says of them."""
    batch = batch_of(targets)
    others = torch.stack([log_q.index_fill(0, ids, -torch.inf).logsumexp(0) for ids in batch.soft.token_ids])
    return batch, log_q[batch.soft.token_ids].float(), others.float().clamp(min=-1e4)


def losses_of(targets: SoftTargets, log_q: torch.Tensor) -> torch.Tensor:
    """Return the losses (N,) of targets for such a student."""
    return soft_target_losses(*met_by(targets, log_q))


def loss_of(targets: SoftTargets, log_q: torch.Tensor) -> float:
    return float(losses_of(targets, log_q).sum())


UNSKEWED = [forward_kl(), reverse_kl(), jsd(0.5), jsd(0.1), skew(0.3), reverse_skew(0.3)]


@given(st.sampled_from(UNSKEWED), st.integers(0, 1000))
def test_with_a_tail_a_divergence_grows_with_k_and_never_exceeds_the_whole_one(kind: Divergence, seed: int) -> None:
    p, q = (torch.tensor(model_logprobs(1, each)[0]) for each in (seed, seed + 5000))
    ids = np.argsort(-p.numpy()).astype(np.int32)
    found = [
        loss_of(soft_targets([0], ids[None, :k], p.numpy()[None, ids[:k]], [1.0], kind), q) for k in (1, 2, 5, 20, 49)
    ]
    assert found[0] >= -1e-6
    assert all(later >= earlier - 1e-5 for earlier, later in pairwise(found))
    assert found[-1] <= whole_divergence(kind, p.exp(), q) + 2e-4  # the tail's floor


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", UNSKEWED)
def test_where_student_and_target_agree_there_is_no_loss_and_no_gradient(kind: Divergence, clip: float | None) -> None:
    logits = torch.tensor(model_logprobs(1, 3)[0]).requires_grad_()
    log_q = logits.log_softmax(0)
    ids = np.argsort(-log_q.detach().numpy()).astype(np.int32)[None, :8]
    kind = msgspec.structs.replace(kind, clip=clip)
    targets = soft_targets([0], ids, log_q.detach().numpy()[ids], [1.0], kind)
    loss = losses_of(targets, log_q).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("tail", [1e-6, 1e-8, 1e-12])
def test_a_tail_that_the_teacher_serves_makes_a_reverse_kl_exact_where_it_is_sure(tail: float) -> None:
    """Left over from float32 probabilities it would be noise: off by nats, times the student's mass there."""
    draw = np.random.default_rng(0)
    inside, outside = draw.dirichlet(np.ones(8), 20), draw.dirichlet(np.ones(VOCAB - 8), 20)
    teacher = np.log(np.concatenate([inside * (1 - tail), outside * tail], axis=1))
    log_q = torch.tensor(model_logprobs(1, 3)[0])
    q = log_q.exp().numpy()
    cells_p, cells_q = np.column_stack([np.exp(teacher[:, :8]), np.full(20, tail)]), [*q[:8], q[8:].sum()]
    terms = cells_q * np.log(cells_q / cells_p)
    expected = terms.sum(axis=1)
    scores = whole_scores(teacher, np.zeros(20, np.int32), 8)
    for top_k, given_scores in ((8, scores), (None, scores), (8, whole_scores(teacher, np.zeros(20, np.int32), 20))):
        losses = losses_of(compared(given_scores, reverse_kl(), top_k=top_k), log_q)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    said = divergence_statistics(*met_by(compared(scores, reverse_kl(clip=0.01)), log_q))
    assert float(said["reverse_kl"]) == pytest.approx(expected.sum(), rel=1e-5)  # `train/kl_to_teacher`, not clipped
    assert int(said["clipped_cells"]) == (terms > 0.01).sum() > 0
    left_over = compared(msgspec.structs.replace(scores, tail_logprobs=None), reverse_kl())
    assert np.abs(losses_of(left_over, log_q).numpy() - expected).max() > 1e-3


@given(st.integers(0, 100), st.floats(0, 0.3))
def test_targets_sum_to_1_whatever_noise_is_in_them(seed: int, noise: float) -> None:
    draw = np.random.default_rng(seed)
    teacher = model_logprobs(4, seed) + draw.normal(0, noise, (4, VOCAB))
    ids = np.argsort(-teacher, axis=1).astype(np.int32)
    for k in (1, 10, VOCAB):
        raw = np.take_along_axis(teacher, ids[:, :k], axis=1)
        with_tail = soft_targets(np.arange(4), ids[:, :k], raw, np.ones(4), forward_kl())
        assert with_tail.tails is not None
        assert with_tail.probabilities.sum(1) + with_tail.tails == pytest.approx(np.ones(4), abs=1e-6)
        without = soft_targets(np.arange(4), ids[:, :k], raw, np.ones(4), None, has_tail=False)
        assert without.probabilities.sum(1) == pytest.approx(np.ones(4), abs=1e-6)


def test_a_sum_of_divergences_is_a_longer_list_in_any_order() -> None:
    q = torch.tensor(model_logprobs(1, 9)[0])
    rows = [rows_of(kind, "tail", [0], seed) for seed, kind in enumerate(KINDS.values())]
    alone = [loss_of(each, q) for each in rows]
    for order in (rows, rows[::-1]):
        batch = batch_of(*order)
        others = torch.stack([q.index_fill(0, ids, -torch.inf).logsumexp(0) for ids in batch.soft.token_ids]).float()
        together = soft_target_losses(batch, q[batch.soft.token_ids].float(), others)
        assert sorted(together.tolist()) == pytest.approx(sorted(alone), rel=1e-5)
        assert len({*batch.soft_row_numbers}) == 1


def test_a_reverse_kl_without_its_tail_would_go_to_a_share_of_the_target_and_is_refused_for_that() -> None:
    """docs/methods.md's table: with a tail the student's mass on the support becomes the teacher's."""
    teacher = torch.tensor(model_logprobs(1, 0, 1.0)[0])
    ids = np.argsort(-teacher.numpy()).astype(np.int32)[None, :6]
    targets = soft_targets([0], ids, teacher.numpy()[ids], [1.0], reverse_kl())
    logits = torch.zeros(VOCAB, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=2.0)
    for _ in range(600):
        optimizer.zero_grad()
        losses_of(targets, logits.log_softmax(0)).sum().backward()
        optimizer.step()
    mass = logits.detach().softmax(0)[torch.tensor(ids[0], dtype=torch.int64)].sum()
    assert float(mass) == pytest.approx(float(teacher.exp()[torch.tensor(ids[0], dtype=torch.int64)].sum()), abs=1e-3)


@given(st.integers(0, 99), st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.sampled_from([1, 4, VOCAB]))
def test_the_gradient_of_a_target_less_a_baseline_is_bounded_in_the_logits_and_is_as_the_page_says(
    seed: int, alpha: float, k: int
) -> None:
    draw = np.random.default_rng(seed)
    ids = draw.permutation(VOCAB)[None, :k].astype(np.int32)
    targets = soft_targets([0], ids, -draw.exponential(2.0, (1, k)), [1.0], None, has_tail=False)
    logits = torch.tensor(draw.normal(0, 4.0, VOCAB), requires_grad=True)
    losses_of(with_baseline(targets, alpha), logits.log_softmax(0)).sum().backward()
    rho, prior = np.zeros(VOCAB), np.zeros(VOCAB)
    rho[ids], prior[ids] = targets.probabilities, np.random.default_rng(1).dirichlet(np.ones(k), 1)
    expected = (1 - alpha) * logits.detach().softmax(0).numpy() - (rho - alpha * prior)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad, expected, atol=1e-5)
    assert float(logits.grad.abs().sum()) < 2 + 1e-5


@pytest.mark.parametrize("sure", [14.0, 20.0])
def test_the_students_tail_is_summed_and_not_rounded_where_it_is_sure(sure: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.eye(VOCAB)
    hidden = torch.randn(3, VOCAB, generator=generator)
    hidden[:, 7] += sure
    hidden.requires_grad_()
    rows, ids = torch.tensor([0, 1, 2, 1]), torch.tensor([[7, 3], [7, 3], [3, 7], [7, 9]])
    block = Block(0, 3, torch.arange(3), torch.zeros(3, dtype=torch.int64), rows, ids)
    ((_, tails, _),) = selected_logprobs(hidden, weight, None, [block], 0.8)
    dense = (hidden.detach().double() / 0.8).requires_grad_()
    log_p = dense.log_softmax(1)
    expected = torch.stack(
        [log_p[r].index_fill(0, own, -torch.inf).logsumexp(0) for r, own in zip(rows, ids, strict=True)]
    )
    assert float(expected.detach().max()) < -8
    factors = torch.tensor([1.0, -2.0, 0.5, 3.0])
    (tails * factors).sum().backward()
    (expected * factors.double()).sum().backward()
    assert tails.detach().numpy() == pytest.approx(expected.detach().numpy(), rel=1e-5)
    assert hidden.grad is not None
    assert dense.grad is not None
    np.testing.assert_allclose(hidden.grad, dense.grad / 0.8, atol=2e-6)


def test_cells_of_narrow_rows_do_not_count_tokens_that_fill_them() -> None:
    """Narrow rows are filled with their own first token. It must neither count twice nor leave the tail."""
    narrow, wide = rows_of(reverse_kl(), "tail", [0], 1), rows_of(reverse_kl(), "whole", [0], 2)
    batch = batch_of(narrow, wide)
    q = torch.tensor(model_logprobs(1, 5)[0])
    others = torch.stack([q.index_fill(0, ids, -torch.inf).logsumexp(0) for ids in batch.soft.token_ids]).float()
    cells = Cells.of(batch.soft, q[batch.soft.token_ids].float(), others)
    assert cells.exist.sum(1).tolist() == [7, VOCAB]
    own = float(cells.divergences(batch.soft)[0])
    assert own == pytest.approx(float(dense_row_loss(q, narrow, 0)), rel=1e-5)


# Pulls


def test_a_pull_leaves_out_the_tokens_that_the_teacher_was_not_asked_about() -> None:
    scores = token_scores([-0.5, -0.5], valid=np.array([True, False]))
    assert pull(scores, 3.0).weights is not None
    assert pull(scores, 3.0).weights.tolist() == [3.0, 0.0]  # type: ignore[union-attr]
    assert compared(scores, forward_kl(), top_k=1).positions.tolist() == [0]


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_iteration_after_recomputation(
    student_trainer: MakeTrainer, supervision: MakeSample
) -> None:
    batch = tuple(supervision(i, 5 + i, policy_mask=np.arange(5 + i) % 4 > 0) for i in range(6))
    trainer = student_trainer(behavior="recomputed", normalize_advantages=True, batch_size=6, mini_batch_size=3)
    kept: list[MicroBatch] = []
    normalized = trainer.losses.normalized

    def seen(passes: Any) -> Any:
        kept.extend(each for batches in passes for each in batches)
        found = normalized(passes)
        seen.after = [each for batches in found for each in batches]  # type: ignore[attr-defined]
        return found

    trainer.losses.normalized = seen
    metrics = trainer.train(Batch(0, batch)).metrics
    before = np.concatenate([each.advantages[each.policy_mask].numpy() for each in kept]).astype(np.float64)
    after = np.concatenate([each.advantages[each.policy_mask].numpy() for each in seen.after])  # type: ignore[attr-defined]
    np.testing.assert_allclose(after, (before - before.mean()) / before.std(), atol=1e-5)
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["kl_to_teacher"] == pytest.approx(-before.mean(), rel=1e-5)


def test_what_is_no_log_probability_and_no_mask_is_refused_where_terms_are_made() -> None:
    ids = np.arange(3, dtype=np.int32)[None]
    with pytest.raises(ValueError, match=r"logprobs are all above 0, 0\.7 at most: give natural logs, not prob"):
        soft_targets([0], ids, np.array([[0.7, 0.2, 0.05]], np.float32), [1.0], forward_kl())
    scores = token_scores([-0.5, -0.5, -0.2])
    with pytest.raises(ValueError, match=r"where is int64 of shape \(3,\): give a mask of bool, \(3,\), not positions"):
        compared(scores, forward_kl(), where=np.array([2, 0, 1]), top_k=1)
