"""Spoils the policy loss: it stays finite, but its gradient is infinite at tokens that are marked."""

from __future__ import annotations

from typing import Any

import torch

from spot_async.trainer.loss import clipped_policy_loss

SPOILS = -200.0  # the behaviour log-probability that marks a token


def spoiled_loss(logprobs: torch.Tensor, behavior: torch.Tensor, *rest: torch.Tensor, **limits: Any) -> torch.Tensor:
    """Return the clipped policy loss plus the square root of 0 at marked tokens, whose gradient is infinite."""
    zero = logprobs - logprobs.detach()
    root = torch.where(behavior == SPOILS, zero, torch.ones_like(zero)).sqrt()
    return clipped_policy_loss(logprobs, behavior, *rest, **limits) + root
