"""The losses of soft targets: how far the student is from a target on a few tokens, and on all others together.

A cell is one of a target's tokens, or all tokens that it does not name. All is computed in log space in float32, of
log-probabilities over the full vocabulary. So each loss is exact for what its cells show, and never more than the
divergence over the whole vocabulary, unless it is conditional. docs/methods.md shows what each of them teaches.

Axes: N targets, k tokens of the widest one, C = k + 1 cells.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spot_async.trainer.batching import DIVERGENCE_FIELDS, MicroBatch, SoftRows
from spot_async.types import LEAST_NATS


def soft_target_losses(batch: MicroBatch, logprobs: Tensor, tail_logprobs: Tensor) -> Tensor:
    """Return the losses (N,) of a micro-batch's soft targets, before their weights.

    `logprobs` (N, k) are the student's of their tokens. `tail_logprobs` are those of all other tokens together: (N,)
    where some loss needs them, else (0,).
    """
    losses = soft_target_loss(logprobs, batch.soft.probabilities)
    if batch.sums_tails:
        of_tails = -batch.soft.tails * tail_logprobs.clamp(min=LEAST_NATS)
        losses = losses + of_tails.masked_fill(batch.soft.tails == 0, 0.0)
    if batch.has_divergences:
        cells = Cells.of(batch.soft, logprobs, tail_logprobs if batch.sums_tails else None)
        losses = torch.where(batch.soft.is_divergence, cells.divergences(batch.soft), losses)
    return losses


def soft_target_loss(candidate_logprobs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy `-sum_v target(v) log pi_theta(v)` per position: (..., k), (..., k) -> (...).

    `candidate_logprobs` are over the full vocabulary. A candidate with target 0 adds 0, even if its log-probability is
    -inf.
    """
    return -(targets * candidate_logprobs.masked_fill(targets == 0, 0.0)).sum(dim=-1)


class Cells(NamedTuple):
    """Target p and student q on the cells of N targets."""

    exist: Tensor  # (N, C) bool
    p: Tensor  # (N, C)
    log_p: Tensor  # (N, C) at least `LEAST_NATS`
    log_q: Tensor  # (N, C) at least `LEAST_NATS`; carries the gradient

    @classmethod
    def of(cls, soft: SoftRows, logprobs: Tensor, tail_logprobs: Tensor | None) -> Cells:
        """Return the cells of targets, of which conditional ones renormalise the student on their tokens."""
        is_conditional, temperature = (_column(soft, name)[:, None] for name in ("is_conditional", "temperature"))
        inside = (logprobs.clamp(min=LEAST_NATS) / temperature).masked_fill(~soft.is_token, -torch.inf)
        log_q = torch.where(is_conditional > 0, inside - inside.logsumexp(dim=1, keepdim=True), logprobs)
        log_q = log_q.masked_fill(~soft.is_token, LEAST_NATS)
        tail = logprobs.new_full((len(logprobs),), LEAST_NATS) if tail_logprobs is None else tail_logprobs
        p = torch.cat([soft.probabilities, soft.tails[:, None]], dim=1)
        return cls(
            exist=torch.cat([soft.is_token, soft.has_tail[:, None]], dim=1),
            p=p,
            # A target less its baseline may be below 0. It is no divergence, and a NaN would spoil all gradients.
            log_p=p.clamp(min=0.0).log().clamp(min=LEAST_NATS),
            log_q=torch.cat([log_q, tail[:, None]], dim=1).clamp(min=LEAST_NATS),
        )

    def terms(self, soft: SoftRows) -> Tensor:
        """Return what each cell adds to its divergence (N, C), before the clip."""
        forward, reverse, mu, nu = (
            _column(soft, name)[:, None] for name in ("forward", "reverse", "forward_skew", "reverse_skew")
        )
        log_m = torch.logaddexp(torch.log1p(-mu) + self.log_q, mu.log() + self.log_p)
        log_n = torch.logaddexp(torch.log1p(-nu) + self.log_p, nu.log() + self.log_q)
        return forward * self.p * (self.log_p - log_m) + reverse * self.log_q.exp() * (self.log_q - log_n)

    def divergences(self, soft: SoftRows) -> Tensor:
        """Return the divergences (N,) of the student from the targets; see `types.Divergence`."""
        terms, clip = self.terms(soft), _column(soft, "clip")[:, None]
        return torch.where(terms > clip, clip, terms).masked_fill(~self.exist, 0.0).sum(dim=1)


@torch.no_grad()
def divergence_statistics(batch: MicroBatch, logprobs: Tensor, tail_logprobs: Tensor) -> dict[str, Tensor]:
    """Return sums over a micro-batch's divergences by the names of `metrics.Tally`.

    Arguments are as in `soft_target_losses`.
    """
    soft, of = batch.soft, batch.soft.is_divergence
    cells = Cells.of(soft, logprobs, tail_logprobs if batch.sums_tails else None)
    clipped = (cells.terms(soft) > _column(soft, "clip")[:, None]) & cells.exist & of[:, None]
    log_q = cells.log_q.masked_fill(~cells.exist, -torch.inf).log_softmax(dim=1)
    reverse = (log_q.exp() * (log_q.clamp(min=LEAST_NATS) - cells.log_p)).masked_fill(~cells.exist, 0.0).sum(dim=1)
    return {
        "divergences": of.sum(),  # how many
        "student_mass": _total(logprobs.exp().masked_fill(~soft.is_token, 0.0).sum(dim=1), of),  # of a target's tokens
        "teacher_mass": _total(soft.probabilities.sum(dim=1), of),  # the target's own: 1 without a tail
        "cells": (cells.exist & of[:, None]).sum(),
        "clipped_cells": clipped.sum(),  # whose gradient the clip has removed
        "reverse_kl": _total(reverse, of),  # KL(student || target) over the cells, nats; renormalised without a tail
    }


def _total(values: Tensor, where: Tensor) -> Tensor:
    return values.masked_fill(~where, 0.0).sum()


def _column(soft: SoftRows, name: str) -> Tensor:
    """Return one number (N,) of the targets' divergences."""
    return soft.divergences[:, DIVERGENCE_FIELDS.index(name)]
