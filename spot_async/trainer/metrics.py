"""The trainer's metrics: their names and meanings, and the sums they are computed from.

Every rank tallies its own micro-batches; `Tally.report` is called on sums over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

METRICS: dict[str, str] = {
    "loss": "objective minimised, mean over the iteration's updates; the sum of the three parts below",
    "loss_policy": "clipped policy term; near the negative mean advantage when the data are on-policy",
    "loss_branch": "weighted soft-target loss: SPOT's branches (cross-entropy), EOPD's and KD's forward KL",
    "loss_reference": "KL to the reference, its coefficient included",
    "ratio_mean": "mean of pi_theta / pi_old per token; 1 on-policy, drifts over the iteration's updates",
    "ratio_max": "largest ratio of any token; a large one means that server and trainer disagree on pi_old",
    "clip_fraction": "share of tokens whose gradient the clip removed",
    "behavior_kl": "k3 estimate of KL(pi_old || pi_theta) per token, nats",
    "advantage_mean": "mean per-token advantage; for distillation the negative reverse KL to the teacher",
    "grad_norm": "gradient norm before clipping, mean over updates",
    "learning_rate": "of all updates of the iteration",
    "branch_positions": "positions with a soft target, |B+| summed over trajectories",
    "branch_positions_per_trajectory": "the same per trajectory",
    "trajectories": "trained in the iteration",
    "tokens": "response tokens trained in the iteration",
    "updates": "optimiser steps",
    "train_s": "seconds from the batch's arrival to the last optimiser step",
    "publish_s": "seconds to write the weights durably",
    "tokens_per_s": "tokens / train_s",
}

_SUMS = (
    "loss",
    "loss_policy",
    "loss_branch",
    "loss_reference",
    "trajectories",
    "tokens",
    "branch_positions",
    "policy_tokens",
    "advantage",
    "ratio",
    "clipped_tokens",
    "behavior_kl",
)


class Tally:
    """Sums over micro-batches, kept on the device so that adding to them never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, **amounts: Tensor | float) -> None:
        """Add to sums by name (`_SUMS`); those not named stay."""
        unknown = amounts.keys() - set(_SUMS)
        if unknown:
            raise ValueError(f"no sum is called {sorted(unknown)}")
        row = [torch.as_tensor(amounts.get(name, 0.0), dtype=torch.float64) for name in _SUMS]
        self.sums += torch.stack([value.to(self.sums.device) for value in row])

    def see_ratio(self, ratio: Tensor) -> None:
        self.ratio_max = torch.maximum(self.ratio_max, ratio.double())

    def report(self, *, updates: int, grad_norm: float, learning_rate: float, train_s: float) -> dict[str, float]:
        """The `METRICS`, except `publish_s`. Means over nothing are 0."""
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        policy_tokens = max(1.0, sums["policy_tokens"])
        return {
            **{name: sums[name] / updates for name in ("loss", "loss_policy", "loss_branch", "loss_reference")},
            "ratio_mean": sums["ratio"] / policy_tokens,
            "ratio_max": self.ratio_max.item(),
            "clip_fraction": sums["clipped_tokens"] / policy_tokens,
            "behavior_kl": sums["behavior_kl"] / policy_tokens,
            "advantage_mean": sums["advantage"] / policy_tokens,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "branch_positions": sums["branch_positions"],
            "branch_positions_per_trajectory": sums["branch_positions"] / sums["trajectories"],
            "trajectories": sums["trajectories"],
            "tokens": sums["tokens"],
            "updates": float(updates),
            "train_s": train_s,
            "tokens_per_s": sums["tokens"] / train_s,
        }
