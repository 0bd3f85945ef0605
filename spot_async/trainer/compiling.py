"""The student's layers, compiled by torch, and a trial of their numbers before training begins.

Only the forward passes of the repeated layers are compiled. What gathers parameters and what runs a layer once more
stays outside. So does attention inside documents: it would be compiled anew for all new lengths.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spot_async.base.text import first_line
from spot_async.errors import DataError
from spot_async.trainer.batching import MicroBatch, collate
from spot_async.trainer.loading import decoder_layers
from spot_async.trainer.model import ResponseLogprobs
from spot_async.trainer.parallel import Forward, Precision, local
from spot_async.types import Supervision

TRIAL_LENGTHS = (24, 9, 16)  # tokens of made-up documents
# How far compiled numbers may be off plain ones, of their norm. bfloat16 is rounded at fewer places when compiled.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}


def compile_layers(model: PreTrainedModel) -> None:
    """Let the layers' forward passes be compiled when they first run, once for all lengths.

    Raises `DataError` for a model that marks no layers.
    """
    layers = decoder_layers(model)
    if not layers:
        raise DataError(f"training.compile=true: {type(model).__name__} marks no layers; set training.compile=false")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def try_compiled(
    forward: Forward,
    student: ResponseLogprobs,
    device: torch.device,
    dtype: Precision,
    *,
    is_packed: bool,
    is_first_rank: bool,
) -> None:
    """Run made-up documents forward and backward, plain and then compiled. All ranks must call it.

    The plain gradients are kept on the CPU meanwhile. Nothing of the trial stays but compiled code. Raises `DataError`
    if a layer cannot be compiled, or if its numbers are further off than `TOLERANCE`.
    """
    batch = _made_up(student.student.config.get_text_config().vocab_size, is_packed=is_packed).to(device)
    with torch.compiler.set_stance("force_eager"):
        plain = _numbers(forward, student, batch)
    started = time.perf_counter()
    name = "training.compile=true"
    try:
        compiled = _numbers(forward, student, batch)
    except RuntimeError as error:  # torch's own, of its compiler, and of a C++ compiler that is missing
        raise DataError(
            f"{name}: the student cannot be compiled: {first_line(error)}; set training.compile=false"
        ) from error
    compile_s = time.perf_counter() - started
    gaps = _gap(compiled[:1], plain[:1]), _gap(compiled[1:], plain[1:])
    if not max(gaps) <= TOLERANCE[dtype]:
        raise DataError(
            f"{name}: compiled layers are {max(gaps):.1g} off plain ones, of the norm, and {TOLERANCE[dtype]:g} is "
            f"allowed in {dtype}; set training.compile=false"
        )
    if is_first_rank:
        sys.stderr.write(
            f"compiled the layers in {compile_s:.0f} s: off plain ones by {gaps[0]:.1g} of the log-probabilities' "
            f"norm, {gaps[1]:.1g} of the gradients'\n"
        )


def _numbers(forward: Forward, model: nn.Module, batch: MicroBatch) -> list[Tensor]:
    """Return log-probabilities and this rank's part of the gradients of their sum. Leaves no gradients behind."""
    logprobs, *_ = forward(batch)
    torch.autograd.backward(logprobs.sum())
    gradients = [local(each.grad) for each in model.parameters() if each.grad is not None]
    numbers = [each.detach().to("cpu", copy=True) for each in (logprobs, *gradients)]
    model.zero_grad(set_to_none=True)
    return numbers


def _gap(numbers: list[Tensor], expected: list[Tensor]) -> float:
    """Return the norm of the difference of two lists, of the norm of the second."""
    difference = sum(float((a - b).norm()) ** 2 for a, b in zip(numbers, expected, strict=True))
    norm = sum(float(each.norm()) ** 2 for each in expected)
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def _made_up(vocab_size: int, *, is_packed: bool) -> MicroBatch:
    """Return documents of a few tokens, all but the first of which are a response."""
    documents = [np.arange(length, dtype=np.int32) * 7 % vocab_size for length in TRIAL_LENGTHS]
    nothing: dict[str, Any] = {"problem_id": "trial", "version": None}
    return collate(
        [
            Supervision(
                prompt_ordinal=ordinal,
                prompt_ids=ids[:1],
                response_ids=ids[1:],
                behavior_logprobs=np.zeros(len(ids) - 1, np.float32),
                **nothing,
            )
            for ordinal, ids in enumerate(documents)
        ],
        is_packed=is_packed,
    )
