"""Counts the arithmetic of a student: the floating-point operations of matrix products.

It is the count behind model FLOPs utilisation (MFU), as in PaLM (Chowdhery et al. 2022, appendix B), nanochat and
torchtitan: what the step needs, whoever computes it and however. A multiplication and its addition are 2 operations.
Not counted are embedding look-ups, norms, activation functions, padding, and what is computed a second time only to
save memory (layers and blocks of logits in the backward pass).
"""

from __future__ import annotations

from collections.abc import Collection

from spot_async.config.lora import TARGETS, LoraConfig
from spot_async.models.model_size import ModelSize


def forward_operations(size: ModelSize, lengths: Collection[int], rows: int, lora: LoraConfig | None = None) -> int:
    """Return the operations of one forward pass over sequences of these numbers of input tokens.

    A token takes 2 for each parameter of the layers' matrices. The output layer counts for `rows` only, those whose
    logits are computed. Attention to a token takes 4 for each layer and query width. A token attends to itself and to
    those before it, which is half of what PaLM counts.
    """
    whole_layers = size.layers - size.windowed_layers
    attended = whole_layers * _attended(lengths) + size.windowed_layers * _attended(lengths, size.window)
    adapters = 0 if lora is None else size.adapter_parameters(lora.rank, TARGETS[lora.targets])
    return _matrices(size, lengths, rows) + 4 * size.queries * attended + 2 * size.layers * adapters * sum(lengths)


def training_operations(
    size: ModelSize,
    lengths: Collection[int],
    rows: int,
    *,
    lora: LoraConfig | None = None,
    recomputes_behavior: bool = False,
) -> int:
    """Return the operations to train once on such sequences: three times those of the forward pass.

    So a token takes 6 for each parameter of a matrix: 2 forward, 2 for the gradient of its input, 2 for that of the
    matrix. Frozen matrices of a student with adapters take 4. With `recomputes_behavior` there is one more forward
    pass, which is part of the method.
    """
    frozen = _matrices(size, lengths, rows) if lora is not None else 0
    return (3 + recomputes_behavior) * forward_operations(size, lengths, rows, lora) - frozen


def _matrices(size: ModelSize, lengths: Collection[int], rows: int) -> int:
    return 2 * (size.layers * size.layer_matrices * sum(lengths) + size.hidden * size.vocabulary * rows)


def _attended(lengths: Collection[int], window: int | None = None) -> int:
    """Return how many pairs there are of a token and one that it attends to, in one layer."""
    found = 0
    for length in lengths:
        whole = length if window is None else min(length, window)
        found += whole * (whole + 1) // 2 + (length - whole) * whole
    return found
