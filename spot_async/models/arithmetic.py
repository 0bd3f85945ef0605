"""Counts the arithmetic that training takes: the floating-point operations of matrix products.

It is the count behind model FLOPs utilisation (MFU), as in PaLM (Chowdhery et al. 2022, appendix B), nanochat and
torchtitan: what the step needs, whoever computes it and however. A multiplication and its addition are 2 operations.
Not counted are embedding look-ups, norms, activation functions, padding, and what is computed a second time only to
save memory (layers and blocks of logits in the backward pass).
"""

from __future__ import annotations

from collections.abc import Collection

from spot_async.config.lora import TARGETS, LoraConfig
from spot_async.models.model_size import ModelSize


def training_operations(
    size: ModelSize,
    lengths: Collection[int],
    rows: int,
    *,
    lora: LoraConfig | None = None,
    recomputes_behavior: bool = False,
) -> float:
    """Return the operations to train once on sequences of these numbers of input tokens.

    A token takes 6 for each parameter of the layers' matrices: 2 forward, 2 for the gradient of its input, 2 for that
    of the matrix. Frozen matrices of a student with adapters take 4. The output layer counts for `rows` only, those
    whose logits are computed. Attention to a token takes 12 for each layer and query width: two products forward, four
    backward. A token attends to itself and to those before it, which is half of what PaLM counts.

    With `recomputes_behavior` there is one more forward pass, which is part of the method.
    """
    tokens = sum(lengths)
    # Of one forward pass:
    matrices = 2 * (size.layers * size.layer_matrices * tokens + size.hidden * size.vocabulary * rows)
    whole_layers = size.layers - size.windowed_layers
    attended = whole_layers * _attended(lengths) + size.windowed_layers * _attended(lengths, size.window)
    attention = 4 * size.queries * attended
    adapters = 0
    if lora is not None:
        adapters = 2 * size.layers * size.adapter_parameters(lora.rank, TARGETS[lora.targets]) * tokens
    trained = (2 if lora is not None else 3) * matrices + 3 * (attention + adapters)
    return float(trained + recomputes_behavior * (matrices + attention + adapters))


def _attended(lengths: Collection[int], window: int | None = None) -> int:
    """Return how many pairs there are of a token and one that it attends to, in one layer."""
    found = 0
    for length in lengths:
        whole = length if window is None else min(length, window)
        found += whole * (whole + 1) // 2 + (length - whole) * whole
    return found
