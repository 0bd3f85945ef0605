"""Several documents in one row: attention that stays inside each, and whether a model can be trained so.

Positions begin anew in each document, and each attends to itself alone. There is no mask: queries, keys and values are
split by document, and each part is plain causal attention. So nothing is computed between documents.

GPUs may do this in one call in 16 bits, by the flash kernels for variable lengths that torch has. It is used only
after a trial on the device itself: made-up documents have to give what one call for each document gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import accumulate
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spot_async.base.text import first_line
from spot_async.errors import DataError
from spot_async.trainer.loading import read_in_passing
from spot_async.trainer.parallel import factor_dtype
from spot_async.trainer.settings import ONE_CALL, PER_DOCUMENT

LAYERS_OF_A_KIND = 2
PACKING_LENGTHS = (4, 1, 3)
PACKING_TOLERANCE = 1e-4  # of the largest number: rounding makes 1e-6, attention to another document far more
# What transformers' layers also give an attention function, and what changes nothing.
_HARMLESS = {"position_ids", "use_cache", "is_causal"}
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")


class Documents:
    """The lengths of the documents in a row. Compiled layers would be compiled anew for each number of plain ones.

    `ends` (N + 1,) are where they begin and end, int32, on the device that attends to all of them at once.
    """

    def __init__(self, lengths: Sequence[int], ends: Tensor | None = None) -> None:
        self.lengths = list(lengths)
        self.ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) if ends is None else ends


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a document's length is a plain number here, and each would be compiled anew
def attend_each(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention (B, L, heads, d) of queries, keys and values (B, heads, L, d), as transformers asks for it.

    B is 1 if there are several `documents` (`Documents`). Without them a row is one document. Raises `ValueError` for
    all that plain causal attention would leave out, such as windows and soft caps.
    """
    documents: Documents | None = others.pop("documents", None)
    refuse_others(query, key, attention_mask, others)
    lengths = documents.lengths if documents else [query.shape[2]]
    parts = zip(*(torch.split(each, lengths, dim=2) for each in (query, key, value)), strict=True)
    is_grouped = query.shape[1] != key.shape[1]
    choices: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "is_causal": True, "enable_gqa": is_grouped}
    attended = [functional.scaled_dot_product_attention(*part, **choices).transpose(1, 2) for part in parts]
    # A single document is copied too: for its strides, which others do not have, layers would be compiled once more.
    return torch.cat(attended, dim=1), None


AttentionInterface.register(PER_DOCUMENT, attend_each)


def refuse_others(query: Tensor, key: Tensor, attention_mask: Tensor | None, others: Mapping[str, Any]) -> None:
    """Raise `ValueError` for what plain causal attention would leave out. `others` are arguments that it has not."""
    unknown = {name for name, each in others.items() if each is not None and each is not False} - _HARMLESS
    if attention_mask is not None or others.get("is_causal") is False or query.shape[2] != key.shape[2]:
        unknown.add("attention_mask")
    if unknown:
        raise ValueError(f"its attention has {min(unknown)}")


def packs(model: PreTrainedModel, directory: str, wanted: Literal["auto"] | bool, *, is_first_rank: bool) -> bool:
    """Return whether trajectories are packed, as `training.packing` wants it, and prepare the model for it.

    Raises `DataError` for a model that cannot be packed and should be.
    """
    if wanted is False:
        return False
    try:
        with read_in_passing(model, directory), first_layers(model):
            attend_per_document(model)
    except DataError as error:
        if wanted is True:
            raise DataError(f"training.packing=true: {error}; set training.packing=false") from None
        if is_first_rank:
            sys.stderr.write(f"trajectories are padded, not packed: {error}\n")
        return False
    return True


@contextmanager
def first_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let a model have no more than the first `LAYERS_OF_A_KIND` decoder layers made of the same modules."""
    whole = {}
    for layers in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        if not all(isinstance(each, GradientCheckpointingLayer) for each in layers):
            continue
        whole[layers] = list(layers)
        kinds = [tuple(map(type, each.modules())) for each in layers]
        kept = [each for i, each in enumerate(layers) if kinds[:i].count(kinds[i]) < LAYERS_OF_A_KIND]
        del layers[:]
        layers.extend(kept)
    try:
        yield
    finally:
        for layers, every in whole.items():
            del layers[:]
            layers.extend(every)


@torch.no_grad()
def attend_per_document(model: PreTrainedModel) -> None:
    """Make a model attend inside documents alone.

    A few short documents are tried, packed and one by one. What these cannot show is read from the configuration.
    Raises `DataError` for a model that cannot be packed, and leaves it as it was.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention"}:
        raise DataError(f"{name} has {min(others)} layers")
    windows = [] if kinds else [each for each in _WINDOWS if getattr(config, each, None) is not None]
    if windows:
        raise DataError(f"{name} has {windows[0]}={getattr(config, windows[0])}")
    if not model._supports_attention_backend:
        raise DataError(f"{name} takes no attention function")
    before = model.config._attn_implementation
    alone = torch.cat([_hidden_of([length], model) for length in PACKING_LENGTHS], dim=1)
    model.set_attn_implementation(PER_DOCUMENT)
    try:
        gap = (_hidden_of(PACKING_LENGTHS, model) - alone).abs().max() / alone.abs().max()
        if not gap <= PACKING_TOLERANCE:
            raise ValueError(f"packed documents are {gap:.1g} off documents alone")
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        model.set_attn_implementation(before)
        raise DataError(f"{name} cannot be packed: {first_line(error)}") from error


def _hidden_of(lengths: Sequence[int], model: PreTrainedModel) -> Tensor:
    """Return hidden states (1, L, hidden) of made-up documents."""
    packed = {"position_ids": positions(lengths), "documents": Documents(lengths)} if len(lengths) > 1 else {}
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.cat([torch.arange(length) + length for length in lengths])[None] % vocab_size
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False, **packed).last_hidden_state
    return hidden


def positions(lengths: Sequence[int]) -> Tensor:
    """Return positions (1, L) of documents one behind another."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

# Fewer keys than queries: torch 2.11 takes them without a word, later ones with this one.
_parameters = () if varlen_attn is None else signature(varlen_attn).parameters
SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _parameters else {}

ONE_CALL_LENGTHS = (70, 1, 33)
ONE_CALL_TOLERANCE = 2e-2  # of the norm, in bfloat16
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
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=CAUSAL, **SHARED_KEYS
    )
    return cast(Tensor, attended)[None], None


AttentionInterface.register(ONE_CALL, attend_in_one_call)


def attend_documents_at_once(model: PreTrainedModel, device: torch.device) -> bool:
    """Let a packed model attend to all documents of a row in one call, if the device can; return whether it does.

    Says why on standard error if it does not.
    """
    try:
        gap = trial(model, device)
        if not gap <= ONE_CALL_TOLERANCE:
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
    length, gaps = sum(ONE_CALL_LENGTHS), []
    query, key, value = (
        torch.randn(1, number, length, size, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for number in (heads, keys, keys)
    )
    weights = torch.randn(1, length, heads, size, generator=generator).to(device, torch.bfloat16)
    ends = Documents(ONE_CALL_LENGTHS).ends.to(device)
    found = []
    for attend in (attend_each, attend_in_one_call):
        attended, _ = attend(layer, query, key, value, None, documents=Documents(ONE_CALL_LENGTHS, ends))
        found.append([attended.detach(), *torch.autograd.grad(attended, [query, key, value], weights)])
    for expected, got in zip(*found, strict=True):
        gaps.append(float((got.float() - expected.float()).norm() / expected.float().norm()))
    return max(gaps)
