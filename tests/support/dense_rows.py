"""The loss of a soft target from a dense softmax, as TRL, OPSD and verl write it; shares no code with the trainer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from spot_async.types import SoftTargets


def dense_row_loss(row: Tensor, target: SoftTargets, n: int) -> Tensor:
    """Return the loss of a target's n-th row, of the student's log-probabilities (V,)."""
    ids, kind = target.token_ids[n].tolist(), target.divergence
    p = torch.tensor(target.probabilities[n], dtype=row.dtype)
    if target.baselines is not None:
        p = p - torch.tensor(target.baselines[n], dtype=row.dtype)
    if kind is not None and kind.is_conditional:
        log_q = (row[ids] / kind.temperature).log_softmax(-1)
    else:
        log_q = row[ids]
        is_other = torch.ones(len(row), dtype=torch.bool)
        is_other[ids] = False
        if target.tails is not None or (kind is not None and kind.reverse):
            tail = torch.tensor([0.0 if target.tails is None else target.tails[n]], dtype=row.dtype)
            p, log_q = torch.cat([p, tail]), torch.cat([log_q, row[is_other].logsumexp(-1)[None]])
    if kind is None:
        return -(p * log_q).sum()
    q = log_q.exp()
    m = (1 - kind.forward_skew) * q + kind.forward_skew * p
    other = (1 - kind.reverse_skew) * p + kind.reverse_skew * q
    cells = kind.forward * kl_div(m.log(), p, reduction="none")
    if kind.reverse:
        cells = cells + kind.reverse * kl_div(other.log(), log_q, reduction="none", log_target=True)
    return (cells if kind.clip is None else cells.clamp(max=kind.clip)).sum()
