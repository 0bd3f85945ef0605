"""A packed micro-batch never waits for its device: nothing is read back, and nothing is copied there but itself.

For padded ones transformers reads one number back, before the first layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from makers import MakeTrainer, MixedBatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spot_async.trainer.model
from spot_async.trainer import packing
from spot_async.trainer.batching import collate
from spot_async.trainer.messages import UpdateShare
from spot_async.trainer.metrics import Tally

META = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Notes what crosses between the CPU and the meta device, whose numbers cannot be read: `item` and `nonzero` fail
    there by themselves, and so does all that selects by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, results))
        self.operations += 1
        if len({each.device.type for each in leaves if isinstance(each, Tensor)}) > 1:
            self.found.append(str(func))
        return results


@pytest.mark.parametrize(
    ("training", "rows_per_block", "is_at_once"),
    [
        ({}, 100_000, False),
        ({}, 7, True),
        ({"reference_kl": 0.1, "dual_clip": 3.0}, 7, False),
        ({"behavior": "recomputed", "importance_cap": 2.0}, 100_000, False),
    ],
    ids=["packed", "attention in one call, blocks", "all terms, blocks", "recomputed"],
)
def test_a_micro_batch_reads_nothing_back_and_copies_nothing_to_its_device(
    student_trainer: MakeTrainer,
    mixed_batch: MixedBatch,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    rows_per_block: int,
    is_at_once: bool,
) -> None:
    monkeypatch.setattr(spot_async.trainer.model, "LOGITS_PER_BLOCK", 50 * rows_per_block)
    trainer = student_trainer(**training)
    if is_at_once:
        trainer.model.set_attn_implementation(packing.ONE_CALL)
    trainer.model.to(META)
    trainer.losses.device = META
    samples = mixed_batch()
    update = UpdateShare(tuple(each.problem_id for each in samples), 100, dict(enumerate(samples)), ())
    tally = Tally(META, step=0)
    batch = collate(samples, is_packed=trainer._layout.is_packed).to(META)
    with Crossings() as crossings:
        if training.get("behavior") == "recomputed":
            with torch.no_grad():
                sampled, *_ = trainer.losses.response_logprobs(batch.without_soft_targets())
                batch = batch.with_behavior(batch.in_places(sampled))
        trainer.losses.add(batch, update, tally, has_moved=False)
    assert crossings.operations > 100
    assert not crossings.found
    assert all(each.grad is not None for each in trainer.model.parameters())
