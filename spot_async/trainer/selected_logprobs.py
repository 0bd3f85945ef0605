"""Log-probabilities of a few tokens a row from the logits of a whole vocabulary, and their gradient.

Autograd would keep or make several arrays as large as the logits: of each gather's gradient, of the
normaliser's, of their sum, of each change of type. A vocabulary of 150,000 makes those the most of a
small student's step. Here the backward pass makes one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def selected_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """`log_softmax(logits / temperature)[rows, token_ids]` in float32: logits (R, V), rows and ids (M,) -> (M,).

    Pairs may repeat. The gradient has the logits' type.
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
