"""Computes log-probabilities of a few tokens per row from whole-vocabulary logits, and their gradient.

Autograd would make several arrays as large as the logits: for each gather's gradient, the normaliser's, their sum, and
each change of type. With a vocabulary of 150,000 those take most of a small student's step. The backward pass here
makes one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def selected_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Return `log_softmax(logits / temperature)[rows, token_ids]` (M,) in float32, of logits (R, V).

    `rows` and `token_ids` are (M,), and pairs may repeat. The gradient has the logits' type.
    """
    selected: Tensor = _SelectedLogprobs.apply(logits, rows, token_ids, temperature)  # type: ignore[no-untyped-call]
    return selected


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        scaled = _scaled(logits, temperature)
        normaliser = scaled.logsumexp(dim=-1)  # (R,)
        ctx.save_for_backward(logits, normaliser, rows, token_ids)
        ctx.temperature = temperature
        return scaled[rows, token_ids] - normaliser[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, normaliser, rows, token_ids = ctx.saved_tensors
        gradient = gradient / ctx.temperature
        of_row = torch.zeros_like(normaliser).index_add_(0, rows, gradient)
        # d log p(v) / d logit(w) = [v = w] - p(w)
        scaled = _scaled(logits, ctx.temperature)
        shifted = torch.sub(scaled, normaliser[:, None], out=None if scaled is logits else scaled)
        of_logits = shifted.exp_().mul_(-of_row[:, None])
        of_logits.index_put_((rows, token_ids), gradient, accumulate=True)
        return of_logits.to(logits.dtype), None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature
