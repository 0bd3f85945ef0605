"""Says what the trainer makes of samples: their loss, its gradient, and what the student says of them.

    revised = policy.revise(live_batch(samples, loss_of(samples, model).live))
    assert loss_of(revised, model).grad_norm > 0

The functions are the trainer's own. They import torch, which a process that only runs policies does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spot_async.config import TrainingConfig
from spot_async.testing.services import simulated_live
from spot_async.types import FloatArray, Live, LiveBatch, Sample, Supervision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Losses:
    """The loss of a batch, the four parts that it is the sum of, and what it is made of (T tokens of a response)."""

    loss: float
    policy: float
    branch: float  # of soft targets
    reference: float  # coefficient included
    entropy: float  # bonuses included
    gradient: Mapping[str, FloatArray]  # of each parameter, by its name
    grad_norm: float
    advantages: Sequence[FloatArray]  # (T,) of each sample, given ones and pulls; 0 where there is no policy term
    importance_weights: Sequence[FloatArray]  # (T,) of each sample; 1 where there is no policy term
    live: Sequence[Live]  # of each sample


def loss_of(
    batch: Sequence[Sample | Supervision],
    model: PreTrainedModel,
    *,
    training: TrainingConfig | None = None,
    temperature: float = 1.0,
) -> Losses:
    """Return the loss of samples that are one update of a causal model in float32, whose gradients are cleared.

    Those without supervision are left out. `temperature` is that of the rollouts. Unless `training.behavior` is
    `recomputed`, log pi_old is what the samples say. Raises `TrainerError` for arrays that do not fit together.
    """
    from spot_async.trainer.accumulator import Accumulator
    from spot_async.trainer.batching import Layout, check_sample, told, update_shares
    from spot_async.trainer.metrics import Tally
    from spot_async.trainer.model import ResponseLogprobs
    from spot_async.trainer.parallel import Strategy

    training, strategy, tally = training or TrainingConfig(iterations=1), Strategy(), Tally(model.device, step=0)
    given = [each if isinstance(each, Supervision) else each.supervision for each in batch]
    samples = [each for each in given if each is not None]
    for sample in samples:
        vocab_size = model.config.get_text_config().vocab_size
        check_sample(sample, vocab_size=vocab_size, needs_reference=training.reference_kl > 0)
    layout = Layout(is_packed=False, token_budget=training.tokens_per_pass(is_packed=False), linear_work=0)
    losses = Accumulator(training, layout, ResponseLogprobs(model, temperature), strategy, model.device)
    (update,) = update_shares(samples, 1, layout)
    live, (batches,) = losses.look(update), losses.passes([update], first=1)
    model.zero_grad()
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for places, each in zip(update.passes, batches, strict=True):
        losses.add(each, update, tally, has_moved=True)
        rows |= zip(places, zip(each.advantages, losses.importance_weights(each), strict=True), strict=True)
    norm = strategy.clip_grad_norm([*model.parameters()], math.inf)
    gradient = {name: each.grad.numpy(force=True) for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    metrics = tally.report(grad_norms=[norm], learning_rate=0.0)
    found = [[row[: len(own.response_ids)].numpy(force=True) for row in rows[i]] for i, own in enumerate(samples)]
    return Losses(
        loss=metrics["loss"],
        policy=metrics["loss_policy"],
        branch=metrics["loss_branch"],
        reference=metrics["loss_reference"],
        entropy=metrics.get("loss_entropy", 0.0),
        gradient=gradient,
        grad_norm=norm,
        advantages=[advantages for advantages, _ in found],
        importance_weights=[weights for _, weights in found],
        live=[told(live[i]) for i in range(len(samples))],
    )


def live_batch(
    samples: Sequence[Sample], live: Sequence[Live] | None = None, *, iteration: int = 0, progress: float = 0.0
) -> LiveBatch:
    """Return what `revise` is given of samples. `live` is of those with supervision; None: a simulated student's."""
    drafts = [each for each in samples if each.supervision is not None]
    if live is None:
        live = [simulated_live(each.supervision) for each in drafts if each.supervision is not None]
    return LiveBatch(samples=drafts, live=live, iteration=iteration, progress=progress)
