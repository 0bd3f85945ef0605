"""The trainer's loss: terms per token and per position, and how they are added up.

It does not know the method. OPD, EOPD, SPOT, GRPO and KD differ only in which of three terms they have (a clipped
policy term, weighted soft targets, a reference KL) and in the numbers in them. The losses of soft targets are in
`divergence.py`. Running the model, padding and gathering log-probabilities happen elsewhere. The formulas are in
docs/methods.md.

Axes: B trajectories of a micro-batch, T tokens of the longest one (right-padded), N soft-target positions of all
trajectories together, k candidates. Entries under padding are left out of every sum. They must be finite all the same,
because a gradient of 0 times infinity is NaN. What a mask leaves out becomes 0. It is not cut out, because one would
have to wait for the device to learn how much is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spot_async.config import LossAggregation

# Both limits are verl's (`compute_policy_loss` and `kl_penalty` in its core_algos.py).
MAX_LOG_RATIO_NATS = 20.0
MAX_REFERENCE_KL_NATS = 10.0  # per token


def limited_log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return `logprobs - others`, limited to `MAX_LOG_RATIO_NATS` either way. Beyond the limit it has no gradient.

    Without the limit a ratio might overflow, and the zero gradient of a clip would be NaN.
    """
    return (logprobs - others).clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS)


def clipped_policy_loss(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, clip: float, dual_clip: float | None = None
) -> Tensor:
    """Return `-min(r a, clamp(r, 1 - clip, 1 + clip) a)` per token, with `r = pi_theta / pi_old`.

    All shapes are equal. Only `logprobs` carries a gradient. `dual_clip` (> 1) also caps the loss of tokens with a
    negative advantage at `-dual_clip * a`, however large the ratio. Without it the ratio is still limited to e^20
    (`limited_log_ratio`).
    """
    ratio = torch.exp(limited_log_ratio(logprobs, behavior_logprobs))
    objective = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def truncated_importance_weights(old_logprobs: Tensor, served_logprobs: Tensor, cap: float) -> Tensor:
    """Return `min(pi_old / pi_served, cap)` per token, which corrects for the policy that sampled it.

    pi_old is of the iteration's first weights, computed by the trainer. pi_served is of the weights that sampled the
    token, which may be older, computed by the inference server. Neither carries a gradient.
    """
    return torch.exp(old_logprobs - served_logprobs).clamp(max=cap)


@torch.no_grad()
def mismatch_statistics(trainer_logprobs: Tensor, served_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return how far the trainer is from the server over the tokens where `mask` (same shape, bool) is true."""
    difference = (trainer_logprobs - served_logprobs).abs().masked_fill(~mask, 0.0)
    return {
        "tokens": mask.sum(),
        "difference": difference.sum(),  # of log-probabilities, absolute, nats
        "difference_max": _largest(difference),
        # k3 estimates of KL(served || trainer), nats
        "kl": k3(limited_log_ratio(trainer_logprobs, served_logprobs).masked_fill(~mask, 0.0)).sum(),
    }


@torch.no_grad()
def weight_statistics(trainer_logprobs: Tensor, served_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return sums of `pi_trainer / pi_served`, not capped, over the tokens where `mask` (same shape, bool) is true.

    The effective sample size follows of them. Their names are those of `metrics.Tally`.
    """
    weights = limited_log_ratio(trainer_logprobs, served_logprobs).double().exp().masked_fill(~mask, 0.0)
    return {"sampling_weight": weights.sum(), "sampling_weight_squared": weights.square().sum()}


@torch.no_grad()
def ratio_statistics(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    dual_clip: float | None = None,
) -> dict[str, Tensor]:
    """Return statistics of `clipped_policy_loss` over the tokens where `mask` (same shape, bool) is true.

    They are sums by the names of `metrics.Tally`, and the largest ratio. To combine micro-batches and ranks, add the
    sums and take the largest maximum. Means are sums over `policy_tokens`.
    """
    log_ratio = limited_log_ratio(logprobs, behavior_logprobs).masked_fill(~mask, 0.0)
    advantage = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp().masked_fill(~mask, 0.0)
    clipped = ((advantage > 0) & (ratio > 1.0 + clip)) | ((advantage < 0) & (ratio < 1.0 - clip))
    if dual_clip is not None:
        clipped |= (advantage < 0) & (ratio > dual_clip)
    # The limit of the ratio removes a gradient too. Without an advantage there was none to remove.
    clipped |= (advantage != 0) & (log_ratio.abs() == MAX_LOG_RATIO_NATS)
    return {
        "policy_tokens": mask.sum(),
        "ratio": ratio.sum(),
        "ratio_max": _largest(ratio),
        "clipped_tokens": clipped.sum(),
        "behavior_kl": k3(log_ratio).sum(),  # estimates of KL(pi_old || pi_theta), nats
    }


def _largest(values: Tensor) -> Tensor:
    """Return the largest of numbers that are not negative, 0 if there is none."""
    return torch.cat([values.flatten(), values.new_zeros(1)]).max()


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate `r - 1 - log r`, `r = pi_ref / pi_theta`, of KL(pi_theta || pi_ref) per token, in nats.

    Up to `MAX_REFERENCE_KL_NATS` it is non-negative for each token, and unbiased for tokens sampled from pi_theta. A
    token beyond that (`log r` above 2.6 or below -11) counts as the limit and has no gradient, as in verl's
    `low_var_kl`. For tokens sampled from pi_theta, the mean gradient is that of KL(pi_ref || pi_theta), which is not
    the divergence that the value estimates.
    """
    return k3(limited_log_ratio(reference_logprobs, logprobs)).clamp(max=MAX_REFERENCE_KL_NATS)


def k3(log_ratio: Tensor) -> Tensor:
    """Return the estimate `r - 1 - log r` of a KL divergence from log-ratios. It is never negative."""
    return torch.expm1(log_ratio) - log_ratio


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The terms of one micro-batch. Soft targets are flattened over its trajectories, and N may be 0."""

    mask: Tensor  # (B, T) bool, true on response tokens
    policy: Tensor  # (B, T)
    reference_kl: Tensor | None = None  # (B, T), multiplied by `reference_coefficient`; None: there is no such term
    reference_coefficient: float
    entropy: Tensor | None = None  # (B, T) the student's; None: no bonus is for it
    entropy_bonus: Tensor | None = None  # (B, T)
    branch: Tensor  # (N,) losses of soft targets
    branch_weights: Tensor  # (N,) factor of each in its trajectory's loss, e.g. beta / max(1, |B+|)
    branch_rows: Tensor  # (N,) int64: the trajectory (a row of the mask) of each


class LossParts(NamedTuple):
    """A micro-batch's share of the mini-batch loss. Only `total`, the sum of the parts, carries a gradient."""

    total: Tensor
    policy: Tensor
    branch: Tensor
    reference: Tensor  # coefficient included
    entropy: Tensor  # bonuses included


def minibatch_share(
    terms: LossTerms, *, aggregation: LossAggregation, minibatch_trajectories: int, minibatch_tokens: int
) -> LossParts:
    """Return what a micro-batch contributes to its mini-batch's loss.

    A trajectory's loss is `mean_t (policy + coefficient * kl - bonus * entropy) + sum_n weight * soft-target loss`.
    `sequence_mean` gives all trajectories the same weight (the paper). `token_mean` weights them by length (verl), so
    that every token of the mini-batch counts the same. Both denominators are those of the whole mini-batch over all
    ranks. So the shares of all micro-batches and ranks sum to the mini-batch's loss.
    """
    lengths = terms.mask.sum(dim=1).double()  # (B,)
    if aggregation == "sequence_mean":
        trajectory_weights = torch.ones_like(lengths) / minibatch_trajectories
    else:
        trajectory_weights = lengths / minibatch_tokens
    token_weights = (trajectory_weights / lengths.clamp(min=1.0))[:, None] * terms.mask  # (B, T)

    def over_tokens(losses: Tensor) -> Tensor:
        return (token_weights.to(losses.dtype) * losses).sum()

    policy = over_tokens(terms.policy)
    reference = entropy = lengths.new_zeros((), dtype=torch.float32)
    if terms.reference_kl is not None:
        reference = terms.reference_coefficient * over_tokens(terms.reference_kl)
    if terms.entropy is not None and terms.entropy_bonus is not None:
        entropy = -over_tokens(terms.entropy_bonus * terms.entropy)
    branch_weights = trajectory_weights[terms.branch_rows] * terms.branch_weights
    branch = (branch_weights.to(terms.branch.dtype) * terms.branch).sum()
    total = policy + branch + reference + entropy
    return LossParts(total, policy.detach(), branch.detach(), reference.detach(), entropy.detach())
