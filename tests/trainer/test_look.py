"""What the student says of a batch before it is trained: `StudentTrainer.look`, held to dense float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from makers import MakeSample, MakeTrainer, MixedBatch
from transformers import AutoModelForCausalLM

from spot_async.base import wire
from spot_async.terms import (
    cells,
    forward_kl,
    jsd,
    retargeted,
    reverse_kl,
    reverse_skew,
    skew,
    soft_targets,
)
from spot_async.trainer import model as trainer_model
from spot_async.trainer.batching import collate, told
from spot_async.trainer.divergence import Cells
from spot_async.trainer.feed_check import check_arrays
from spot_async.trainer.messages import Batch, Share, UpdateShare
from spot_async.trainer.rank import StudentTrainer
from spot_async.types import Divergence, Live, LiveRows, Supervision

TEMPERATURE = 0.8


def looked(trainer: StudentTrainer, batch: list[Supervision]) -> list[Live]:
    (share,) = trainer.divide(Batch(0, tuple(batch), is_look=True))
    found = trainer.losses.look(wire.decode(wire.encode(share), Share).updates[0])
    return [told(found[place]) for place in range(len(batch))]


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
@pytest.mark.parametrize(
    "training", [{}, {"packing": False}, {"micro_batch_tokens": 1}], ids=["packed", "padded", "one by one"]
)
def test_it_is_what_a_dense_model_says(
    student: Path,
    student_trainer: MakeTrainer,
    mixed_batch: MixedBatch,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    sharding: str,
) -> None:
    monkeypatch.setattr(trainer_model, "LOGITS_PER_BLOCK", 350)
    batch = mixed_batch()
    trainer = student_trainer(temperature=TEMPERATURE, sharding=sharding, **training)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    for sample, live in zip(batch, looked(trainer, batch), strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            rows = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        own = rows.gather(1, torch.tensor(sample.response_ids.tolist())[:, None])[:, 0]
        sampled = np.ones(len(own), bool) if sample.policy_mask is None else sample.policy_mask
        assert (live.where == sampled).all()
        for said, expected in ((live.logprobs, own), (live.entropy, -(rows.exp() * rows).sum(-1))):
            same(said[sampled], expected[torch.from_numpy(sampled)])
            assert np.isnan(said[~sampled]).all()
        assert len(live.rows) == len(sample.soft_targets)
        for targets, said in zip(sample.soft_targets, live.rows, strict=True):
            at = rows[targets.positions.tolist()]
            ids = torch.tensor(targets.token_ids.tolist(), dtype=torch.int64).view(targets.token_ids.shape)
            same(said.logprobs, at.gather(1, ids))
            rest = at.scatter(1, ids, -torch.inf).logsumexp(-1).clamp(min=trainer_model.LEAST_TAIL_NATS)
            same(said.tail_logprobs, rest)


def same(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found).double(), expected, rtol=0, atol=2e-5)


def test_two_looks_are_equal_and_change_nothing(student_trainer: MakeTrainer, mixed_batch: MixedBatch) -> None:
    batch = mixed_batch()
    plain, looking = (student_trainer(name) for name in ("plain", "looking"))
    first, second = looked(looking, batch), looked(looking, batch)
    assert wire.encode(first) == wire.encode(second)
    metrics = [each.train(Batch(0, tuple(batch))).metrics for each in (plain, looking)]
    assert metrics[0]["loss"] == metrics[1]["loss"]
    for one, other in zip(plain.model.parameters(), looking.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_next_batch_takes_log_pi_old_from_a_look_where_it_would_recompute_it(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, normalize: bool
) -> None:
    """Also of tokens that had no policy term when it looked, as `revise` may give them one."""
    training = {"behavior": "recomputed", "mini_batch_size": 2, "normalize_advantages": normalize}
    trainer = student_trainer(**training)
    drafts = mixed_batch()
    batch = [msgspec.structs.replace(each, policy_mask=None) for number, each in enumerate(drafts) if number != 3]
    asked = Batch(0, tuple(batch))

    def updates(*looked_at: Supervision) -> tuple[UpdateShare, ...]:
        if looked_at:
            (share,) = trainer.divide(Batch(0, looked_at, is_look=True))
            trainer.keep(trainer.losses.look(share.updates[0]))
        (share,) = trainer.divide(asked)
        return share.updates

    def have_it(shares: tuple[UpdateShare, ...]) -> list[bool]:
        return [each.old_logprobs is not None for each in shares]

    shares = updates(*drafts)
    assert have_it(shares) == [normalize, True, True, True]
    for update in (each for each in shares if each.old_logprobs is not None):
        for places in update.passes:
            kept = trainer.losses.micro_batch(update, places, True)
            found = trainer.losses.micro_batch(msgspec.structs.replace(update, old_logprobs=None), places, True)
            torch.testing.assert_close(kept.behavior_logprobs, found.behavior_logprobs, rtol=0, atol=2e-5)
            torch.testing.assert_close(kept.advantages, found.advantages, rtol=0, atol=2e-5)
    assert not any(have_it(updates()))  # it was of that batch alone
    assert not any(have_it(updates(*drafts[:4])))  # and is of all samples or none
    served = student_trainer("served", mini_batch_size=2)
    trainer = served
    assert not any(have_it(updates(*drafts)))


def test_later_updates_make_no_pass_of_their_own_for_what_a_look_found(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch
) -> None:
    passes = 0

    def counted(batch: Any) -> Any:
        nonlocal passes
        passes += 1
        return computed(batch)

    trainer = student_trainer(behavior="recomputed", mini_batch_size=2)
    computed, trainer.losses.response_logprobs = trainer.losses.response_logprobs, counted
    (share,) = trainer.divide(Batch(0, tuple(mixed_batch()), is_look=True))
    trainer.keep(trainer.losses.look(share.updates[0]))
    trainer.train(Batch(0, tuple(mixed_batch())))
    assert passes == 1 + 4
    trainer.train(Batch(1, tuple(mixed_batch())))
    assert passes == 1 + 4 + 3 + 4


KINDS = [
    *(None, forward_kl(), reverse_kl(), jsd(0.3), skew(0.1), reverse_skew(0.2)),
    *(forward_kl(is_conditional=True), Divergence(reverse=1.0, is_conditional=True, clip=0.3)),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("has_tail", [True, False])
def test_a_policys_cells_are_those_of_the_loss_and_other_targets_fit_them(
    supervision: MakeSample, kind: Any, has_tail: bool
) -> None:
    generator = np.random.default_rng(3)
    logprobs = np.log(generator.dirichlet(np.full(9, 0.4), size=5)).astype(np.float32)
    student = np.log(generator.dirichlet(np.full(9, 0.4), size=5))
    ids = np.stack([generator.permutation(9)[:4] for _ in range(5)]).astype(np.int32)
    own, theirs = (np.take_along_axis(each, ids, axis=1) for each in (logprobs, student))
    rest = np.log1p(-np.exp(theirs).sum(axis=1))
    has_tail = has_tail and not (kind and kind.is_conditional)
    targets = soft_targets(np.arange(5), ids, own, np.ones(5), kind, has_tail=has_tail)
    rows = LiveRows(logprobs=theirs.astype(np.float32), tail_logprobs=rest.astype(np.float32))
    log_p, log_q = cells(targets, rows)

    batch = collate([supervision(0, 5, targets)], is_packed=True)
    given = torch.from_numpy(rows.logprobs), torch.from_numpy(rows.tail_logprobs)
    found = Cells.of(batch.soft, *given)
    width = log_p.shape[1]
    assert found.exist[:, :width].all()
    assert not found.exist[:, width:].any()
    np.testing.assert_allclose(log_q, found.log_q[:, :width], atol=1e-4)
    np.testing.assert_allclose(log_p, found.log_p[:, :width], atol=1e-4)

    moved = retargeted(targets, (log_p + log_q) / 2)
    check_arrays(supervision(0, 5, moved), 50)
    total = moved.probabilities.sum(axis=1) + (0 if moved.tails is None else moved.tails)
    np.testing.assert_allclose(total, 1, atol=1e-6)
    np.testing.assert_allclose(retargeted(targets, log_p).probabilities, targets.probabilities, atol=1e-6)
