"""Computes log-probabilities of a few tokens per row from hidden states and the output layer, and their gradients.

Autograd would make several arrays as large as the logits: for each gather's gradient, the normaliser's, their sum, and
each change of type. With a vocabulary of 150,000 those take most of a small student's step. The backward pass here
makes one, a block of rows at a time. Logits and the layer's gradient are float32, whatever the factors are: rounded to
16 bits, logits would be an eighth of a nat apart, and a sum of blocks' gradients would lose as much with each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from spot_async.trainer.parallel import factor_dtype


class Block(NamedTuple):
    """Rows from `start` to `end` whose logits exist at one time, and M pairs of a row and a token, which may repeat."""

    start: int
    end: int
    rows: Tensor  # (M,) int64, counted from `start`
    token_ids: Tensor  # (M,) int64


def selected_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, blocks: Sequence[Block], temperature: float
) -> list[Tensor]:
    """Return each block's `log_softmax(logits / temperature)[rows, token_ids]` (M,) in float32.

    Logits are `hidden @ weight.T + bias`, of hidden states (R, H) and an output layer (V, H) and (V,).
    """
    return list(_SelectedLogprobs.apply(hidden, weight, bias, blocks, temperature))  # type: ignore[no-untyped-call]


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, blocks: Sequence[Block], temperature: float
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.blocks, ctx.temperature = factor_dtype(weight), blocks, temperature
        factors = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        selected, normalisers, kept = [], [], None
        for block in blocks:
            logits = _logits(*factors, bias, block)
            scaled = _scaled(logits, temperature)
            normalisers.append(scaled.logsumexp(dim=-1))  # (R,)
            selected.append(scaled[block.rows, block.token_ids] - normalisers[-1][block.rows])
            # A single block is not computed again: that would not lower the peak of memory.
            kept = logits if len(blocks) == 1 else None
            del logits, scaled  # before the next block's are made
        ctx.save_for_backward(hidden, weight, bias, kept, *normalisers)
        return tuple(selected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, kept, *normalisers = ctx.saved_tensors
        factors = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = of_bias = None
        for block, gradient, normaliser in reversed(list(zip(ctx.blocks, gradients, normalisers, strict=True))):
            logits = _logits(*factors, bias, block) if kept is None else kept
            of_logits = _gradient(logits, block, gradient / ctx.temperature, normaliser, ctx.temperature)
            if bias is not None and ctx.needs_input_grad[2]:
                of_bias = _added(of_bias, of_logits.sum(0))
            of_logits = of_logits.to(ctx.dtype)
            of_hidden[block.start : block.end] = _product(of_logits, factors[1])
            if ctx.needs_input_grad[1]:
                of_weight = _added(of_weight, _product(of_logits.t(), factors[0][block.start : block.end]))
            del logits, of_logits
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_hidden, of_weight, of_bias, None, None


def _gradient(logits: Tensor, block: Block, gradient: Tensor, normaliser: Tensor, temperature: float) -> Tensor:
    """Return the gradient (R, V) of a block's logits, from that (M,) of its selected ones, divided by temperature."""
    of_row = torch.zeros_like(normaliser).index_add_(0, block.rows, gradient)
    # d log p(v) / d logit(w) = [v = w] - p(w)
    scaled = _scaled(logits, temperature)
    of_logits = torch.sub(scaled, normaliser[:, None], out=None if scaled is logits else scaled)
    of_logits.exp_().mul_(-of_row[:, None])
    return of_logits.index_put_((block.rows, block.token_ids), gradient, accumulate=True)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: Block) -> Tensor:
    """Return the logits (R, V) of a block in float32."""
    rows = hidden[block.start : block.end]
    if rows.dtype == torch.float32:
        return functional.linear(rows, weight, bias)
    logits = _product(rows, weight.t())
    return logits if bias is None else logits.add_(bias)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in float32. Sums of 16-bit factors are never rounded to 16 bits."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature
