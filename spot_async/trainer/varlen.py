"""Attention inside documents in one call, by the flash kernels for variable lengths that torch has for GPUs in 16 bits.

It has never run on a GPU. So it is used only after a trial on the device itself: made-up documents have to give what
one call for each document gives. Otherwise it stays at those calls.
"""

from __future__ import annotations

import sys
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spot_async.base.text import first_line
from spot_async.trainer.packing import Documents, attend_each, refuse_others
from spot_async.trainer.parallel import factor_dtype
from spot_async.trainer.settings import ONE_CALL

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

TRIAL_LENGTHS = (70, 1, 33)
TRIAL_TOLERANCE = 2e-2  # of the norm, in bfloat16
CAUSAL = (-1, 0)  # a window over all that comes before, in that function's terms


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the longest document's length is a plain number here
def attend_in_one_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention (1, L, heads, d) of queries, keys and values (1, heads, L, d); otherwise as `attend_each`."""
    documents: Documents | None = others.get("documents")
    if documents is None or dropout or query.shape[-1] != value.shape[-1]:
        plain = (attention_mask, dropout, scaling)
        return cast(tuple[Tensor, None], attend_each(module, query, key, value, *plain, **others))
    del others["documents"]
    refuse_others(query, key, attention_mask, others)
    # Other calls are cast by autocast itself. It does not know this one.
    dtype = factor_dtype(value)
    query, key, value = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))  # (L, heads, d)
    ends, longest = documents.ends, max(documents.lengths)
    attended = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=CAUSAL, enable_gqa=True
    )
    return cast(Tensor, attended)[None], None


AttentionInterface.register(ONE_CALL, attend_in_one_call)


def attend_documents_at_once(model: PreTrainedModel, device: torch.device) -> bool:
    """Let a packed model attend to all documents of a row in one call, if the device can; return whether it does.

    Says why on standard error if it does not.
    """
    try:
        gap = trial(model, device)
        if not gap <= TRIAL_TOLERANCE:
            raise ValueError(f"it is {gap:.1g} off one call for each document")
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        reason = shorten(first_line(error), 160)
        sys.stderr.write(f"attention is called for each document, not once for a row: {reason}\n")
        return False
    model.set_attn_implementation(ONE_CALL)
    return True


def trial(model: PreTrainedModel, device: torch.device) -> float:
    """Return how far results and gradients of made-up documents are off one call for each, as a share of their norm.

    Raises `RuntimeError`, `TypeError`, `ValueError` or `AttributeError` where there is no such function, or a model of
    another kind.
    """
    if varlen_attn is None:
        raise NotImplementedError(f"torch {torch.__version__} has no attention for variable lengths")
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = cast(nn.Module, SimpleNamespace(num_key_value_groups=heads // keys, training=True, is_causal=True))
    generator = torch.Generator().manual_seed(0)
    length, gaps = sum(TRIAL_LENGTHS), []
    query, key, value = (
        torch.randn(1, number, length, size, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for number in (heads, keys, keys)
    )
    weights = torch.randn(1, length, heads, size, generator=generator).to(device, torch.bfloat16)
    ends = Documents(TRIAL_LENGTHS).ends.to(device)
    found = []
    for attend in (attend_each, attend_in_one_call):
        attended, _ = attend(layer, query, key, value, None, documents=Documents(TRIAL_LENGTHS, ends))
        found.append([attended.detach(), *torch.autograd.grad(attended, [query, key, value], weights)])
    for expected, got in zip(*found, strict=True):
        gaps.append(float((got.float() - expected.float()).norm() / expected.float().norm()))
    return max(gaps)
