"""Attention to all documents of a row in one call. torch has it on GPUs alone, so here a stand-in takes its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spot_async.trainer import packing
from spot_async.trainer.packing import Documents, attend_per_document, positions

CPU = torch.device("cpu")
LENGTHS = (20, 1, 33, 7)


def dense(query: Tensor, key: Tensor, value: Tensor, *given: Any, **choices: Any) -> Tensor:
    """Compute what torch documents for its function, with a mask. The arguments must be ones that it takes."""
    if packing.varlen_attn is not None:
        inspect.signature(REAL).bind(query, key, value, *given, **choices)
    ends, key_ends, longest, longest_key = given
    lengths = ends.diff().tolist()
    assert ends.dtype == torch.int32
    assert torch.equal(ends, key_ends)
    assert longest == longest_key == max(lengths)
    assert choices["window_size"] == (-1, 0)
    group = query.shape[1] // key.shape[1]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document[None]).tril()  # (L, L)
    keys, values = (each.repeat_interleave(group, dim=1).double() for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (choices["scale"] or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def mixing(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *given: Any, **choices: Any) -> Tensor:
    """Take a row for one document."""
    one = torch.tensor([0, len(query)], dtype=torch.int32)
    return dense(query, key, value, one, one, len(query), len(query), **choices)


REAL = packing.varlen_attn


@pytest.fixture(params=["qwen3", "gpt2"])  # one with fewer heads of keys, and one that has no word for them
def packed(random_architecture: Callable[..., Path], request: pytest.FixtureRequest) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(random_architecture(request.param)).eval()
    attend_per_document(model)
    return model  # type: ignore[no-any-return]


def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model(
            ids, position_ids=positions(LENGTHS), use_cache=False, documents=Documents(LENGTHS)
        ).logits
    return found


def test_one_call_for_a_row_computes_what_one_for_each_document_does(
    packed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(packed)
    monkeypatch.setattr(packing, "varlen_attn", dense)
    assert packing.attend_documents_at_once(packed, CPU)
    after = logits(packed)
    assert not torch.equal(after, before)  # it really goes another way
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())


def test_a_function_that_mixes_documents_is_found_by_trying(
    packed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = logits(packed)
    monkeypatch.setattr(packing, "varlen_attn", mixing)
    assert not packing.attend_documents_at_once(packed, CPU)
    said = capsys.readouterr().err
    assert said.startswith("attention is called for each document, not once for a row: it is ")
    assert torch.equal(logits(packed), before)


@pytest.mark.parametrize("exists", [True, False])
def test_where_torch_has_no_such_function_it_stays_at_one_call_for_each(
    packed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exists: bool
) -> None:
    """As on a CPU, or with an older torch."""
    if not exists:
        monkeypatch.setattr(packing, "varlen_attn", None)
    assert not packing.attend_documents_at_once(packed, CPU)
    assert capsys.readouterr().err.count("\n") == 1
