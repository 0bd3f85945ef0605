"""Adds up the gradient of a batch's losses, one micro-batch after the other. It makes no step, and knows no file.

`rank.py` steps an optimiser with the sum, and `testing.loss_of` shows it. The formulas are in `loss.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spot_async.config import TrainingConfig
from spot_async.trainer.batching import Layout, MicroBatch, collate, live_of
from spot_async.trainer.divergence import soft_target_losses
from spot_async.trainer.loss import (
    LossParts,
    LossTerms,
    clipped_policy_loss,
    minibatch_share,
    ratio_statistics,
    reference_kl,
    truncated_importance_weights,
)
from spot_async.trainer.messages import UpdateShare
from spot_async.trainer.metrics import Tally
from spot_async.trainer.parallel import Forward, Strategy
from spot_async.types import Live

DEVIATION_FLOOR = 1e-6  # of `training.normalize_advantages`


@dataclass(eq=False)
class Accumulator:
    """One rank's part of the losses of a batch. All ranks call it alike."""

    training: TrainingConfig
    layout: Layout
    response_logprobs: Forward  # as `Strategy.prepare` returns it
    strategy: Strategy
    device: torch.device

    @torch.no_grad()
    def look(self, update: UpdateShare) -> dict[int, Live]:
        """Return what the student says now of this rank's samples, by their places in the batch.

        The ranks do it together, with one pass over the batch. Only a step or a publish shards all weights again.
        """
        found: dict[int, Live] = {}
        for places in update.passes:
            batch = replace(self.micro_batch(update, places, False), wants_entropies=True, sums_tails=True)
            said = self.response_logprobs(batch)
            found |= zip(places, live_of([update.samples[place] for place in places], batch, *said), strict=True)
        return found

    def passes(self, updates: Sequence[UpdateShare], *, first: int = 0) -> list[list[MicroBatch]]:
        """Return micro-batches of updates, before an iteration's first step, as log pi_old is of the weights there.

        `first` is the first one's number. Where it is 0, `add` may find log pi_old (`TrainingConfig.recomputes_apart`).
        """
        passes = [
            [self.micro_batch(update, places, self.training.recomputes_apart(number)) for places in update.passes]
            for number, update in enumerate(updates, start=first)
        ]
        return self.normalized(passes) if self.training.normalize_advantages else passes

    def micro_batch(self, update: UpdateShare, places: Sequence[int], recomputes: bool) -> MicroBatch:
        """Collate samples of an update, with log pi_old as served or, if it `recomputes`, that of a look or of now."""
        batch = collate([update.samples[place] for place in places], is_packed=self.layout.is_packed)
        if recomputes and update.old_logprobs is not None:
            found = np.concatenate([np.zeros(0, np.float32), *(update.old_logprobs[place] for place in places)])
            return batch.with_behavior(batch.in_places(torch.from_numpy(found))).to(self.device)
        batch = batch.to(self.device)
        if not recomputes:
            return batch
        with torch.no_grad():
            sampled, *_ = self.response_logprobs(batch.without_soft_targets())
        return batch.with_behavior(batch.in_places(sampled))

    def normalized(self, passes: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
        """Return all micro-batches with advantages of mean 0 and deviation 1 over the iteration's policy tokens."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in (each for batches in passes for each in batches):
            values = batch.advantages.double()
            sums += torch.stack([batch.policy_mask.sum(), values.sum(), values.square().sum()])
        count, total, squares = self.strategy.sum(sums)
        mean = total / count.clamp(min=1)
        deviation = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt().clamp(min=DEVIATION_FLOOR)
        return [
            [each.with_normalized_advantages(mean.float(), deviation.float()) for each in batches] for batches in passes
        ]

    def add(self, batch: MicroBatch, update: UpdateShare, tally: Tally, *, has_moved: bool) -> LossParts:
        """Add the gradient of one micro-batch's share of its mini-batch's loss."""
        sampled, entropies, *of_soft_targets = self.response_logprobs(batch)
        logprobs = batch.in_places(sampled)  # (B, T); 0 on padding
        recomputes = self.training.behavior == "recomputed"
        if recomputes and not has_moved and not self.training.recomputes_apart(0):
            batch = batch.with_behavior(logprobs.detach())
        weights = self.importance_weights(batch)  # (B, T)
        parts = minibatch_share(
            self._loss_terms(batch, logprobs, entropies, soft_target_losses(batch, *of_soft_targets), weights),
            aggregation=self.training.loss_aggregation,
            minibatch_trajectories=len(update.names),
            minibatch_tokens=update.tokens,
        )
        parts.total.backward()  # type: ignore[no-untyped-call]
        self._tally_loss(batch, logprobs, weights, parts, tally)
        tally.count_distance(batch, of_soft_targets)
        tally.count_lag(batch)
        # Once the weights have moved, `logprobs` are no longer those of the iteration's first weights.
        if recomputes:
            tally.count_mismatch(batch, batch.behavior_logprobs)
        elif not has_moved:
            tally.count_mismatch(batch, logprobs.detach())
        return parts

    def _loss_terms(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, soft_losses: Tensor, weights: Tensor
    ) -> LossTerms:
        """Return the terms of `loss.py`, from log-probabilities (B, T), entropies (R,) or (0,), soft targets' losses
        (N,) and importance weights (B, T).
        """
        training = self.training
        policy = clipped_policy_loss(
            logprobs, batch.behavior_logprobs, batch.advantages, clip=training.clip, dual_clip=training.dual_clip
        )
        return LossTerms(
            mask=batch.mask,
            policy=weights * policy,
            reference_kl=reference_kl(logprobs, batch.reference_logprobs) if training.reference_kl > 0 else None,
            reference_coefficient=training.reference_kl,
            entropy=batch.in_places(entropies) if batch.wants_entropies else None,
            entropy_bonus=batch.entropy_bonus,
            branch=soft_losses,
            branch_weights=batch.soft.weights,
            branch_rows=batch.soft.trajectories,
        )

    def _tally_loss(self, batch: MicroBatch, logprobs: Tensor, weights: Tensor, parts: LossParts, tally: Tally) -> None:
        """Count the loss, and how far the policy has moved, for the iteration's metrics."""
        training = self.training
        ratios = ratio_statistics(
            logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            batch.policy_mask,
            clip=training.clip,
            dual_clip=training.dual_clip,
        )
        tally.see(ratio=ratios.pop("ratio_max"))
        tally.add(
            **ratios,
            loss=parts.total.detach(),
            loss_policy=parts.policy,
            loss_branch=parts.branch,
            loss_reference=parts.reference,
            loss_entropy=parts.entropy,
            trajectories=len(batch.mask),
            tokens=len(batch.rows),
            branch_positions=len({*batch.soft_row_numbers}),
            advantage=batch.advantages.sum(),
            importance_weight=weights.masked_fill(~batch.policy_mask, 0.0).sum(),
            importance_capped=((weights >= (training.importance_cap or math.inf)) & batch.policy_mask).sum(),
        )

    def importance_weights(self, batch: MicroBatch) -> Tensor:
        """Return truncated importance weights (B, T), which are all 1 if no cap is set."""
        cap = self.training.importance_cap
        if cap is None:
            return torch.ones_like(batch.behavior_logprobs)
        return truncated_importance_weights(batch.behavior_logprobs, batch.served_logprobs, cap)
