"""The trainer's updates against plain torch, and what decides which mini-batches they are made of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import DenseLoss, MakeSettings, MakeTrainer, MixedBatch
from transformers import AutoModelForCausalLM

from spot_async.base.seeds import derive_seed
from spot_async.trainer.batching import mini_batches
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import local

RATE, DECAY, NORM, SEED = 3e-4, 1.0, 12.0, 7


def test_iterations_are_clipped_adamw_steps_over_mini_batches_drawn_anew_at_the_scheduled_rate(
    student: Path,
    student_trainer: MakeTrainer,
    mixed_batch: MixedBatch,
    dense_loss: DenseLoss,
    trainer_settings: MakeSettings,
    tmp_path: Path,
) -> None:
    choices = {"iterations": 4, "warmup_iterations": 1, "mini_batch_size": 2, "seed": SEED}
    choices |= {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": NORM}
    trainer = student_trainer(**choices)
    training = trainer_settings(student, tmp_path, **choices).training

    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    norms = []
    # One iteration of warm-up; then the cosine falls from its peak to 0 after the fourth.
    for iteration, rate in enumerate([RATE / 2, RATE, RATE * (1 + math.cos(math.pi / 3)) / 2]):
        batch = mixed_batch()
        metrics = trainer.train(Batch(iteration, tuple(batch))).metrics
        assert metrics["updates"] == 4
        optimizer.param_groups[0]["lr"] = rate
        for mini_batch in mini_batches(batch, 2, derive_seed(SEED, "mini-batches", iteration)):
            optimizer.zero_grad()
            dense_loss(model, mini_batch, training, 1.0).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)))
            optimizer.step()
        expected = model.state_dict()
        for name, tensor in trainer.model.state_dict().items():
            torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=1e-6)
    assert min(norms) < NORM < max(norms)  # some updates were clipped and some were not


@pytest.mark.parametrize(
    "training",
    [{}, {"sharding": "fsdp2"}, {"offload": "optimizer"}, {"lora": {"rank": 2}}],
    ids=["replicated", "sharded", "offloaded", "adapters"],
)
def test_moments_are_there_before_the_first_pass_and_no_gradient_is_left_beside_a_server(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, training: dict[str, Any]
) -> None:
    trainer = student_trainer(**training)
    trainer._settings = trainer._settings.model_copy(update={"shares_devices": True})
    trained = [each for each in trainer.model.parameters() if each.requires_grad]

    def moments() -> list[int]:
        state = trainer._optimizer.state
        return [local(state[each][kind]).data_ptr() for each in trained for kind in ("exp_avg", "exp_avg_sq")]

    before = moments()
    trainer.train(Batch(0, tuple(mixed_batch())))
    assert moments() == before
    assert all(each.grad is None for each in trained)
