"""The student under training: computes log-probabilities of only the tokens that matter.

A vocabulary of 150,000 times a few thousand tokens makes gigabytes of logits. So only the decision rows of responses go
to the output layer, a bounded block at a time (`selected_logprobs.py`). How the model is loaded and spread over ranks
is not decided here.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from spot_async.config import TrainingConfig
from spot_async.errors import DataError
from spot_async.trainer.batching import MicroBatch
from spot_async.trainer.packing import Documents
from spot_async.trainer.selected_logprobs import Block, selected_logprobs

LOGITS_PER_BLOCK = 1 << 26  # 256 MiB in float32: 441 rows of Qwen3's vocabulary; a few copies exist at once


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers, which are sharded and recomputed one by one. Empty if the model marks none."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: PreTrainedModel, training: TrainingConfig) -> None:
    """Make as many layers as are wanted keep only their inputs for the backward pass, and run once more in it.

    The second run happens inside the modules' hooks, where sharding has gathered the parameters. No random state is
    kept, since there is no dropout. Raises `DataError` for a model that marks no layers.
    """
    layers = decoder_layers(model)
    if not layers:
        raise DataError(f"training.recompute_layers: {type(model).__name__} marks no layers that could be run again")
    for layer in layers[: training.recomputed_layers(len(layers))]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return hidden states (1 or B, L, hidden). With right padding a causal model needs no padding mask."""
    packed: dict[str, Any] = {}
    if batch.position_ids is not None:
        packed = {"position_ids": batch.position_ids, "documents": Documents(batch.input_lengths, batch.input_ends)}
    output: Tensor = model.base_model(input_ids=batch.token_ids, use_cache=False, **packed).last_hidden_state
    return output


class ResponseLogprobs(nn.Module):
    """The student with log-probabilities in place of logits.

    It is one module for the whole forward pass, because sharding gathers parameters around a module's forward, and the
    output layer is used outside of the student's own. `temperature` is that of the rollouts, because the policy that is
    trained is the one that sampled.
    """

    def __init__(self, student: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.student = student
        self._temperature = temperature

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return full-vocabulary log-probabilities, float32, of sampled tokens (R,) and of candidates (N, k)."""
        hidden = _hidden_states(self.student, batch).flatten(0, 1).index_select(0, batch.rows)  # (R, hidden)
        output_layer = self.student.get_output_embeddings()

        rows_per_block = max(1, LOGITS_PER_BLOCK // output_layer.weight.shape[0])
        limits = [0, *range(rows_per_block, len(hidden), rows_per_block), len(hidden)]  # one block even without rows
        soft_limits = [bisect_left(batch.soft_row_numbers, limit) for limit in limits]
        blocks = []
        for (start, end), (first, last) in zip(pairwise(limits), pairwise(soft_limits), strict=True):
            soft_rows, soft_ids = batch.soft_rows[first:last] - start, batch.soft_ids[first:last]
            rows = torch.cat(
                [torch.arange(end - start, device=hidden.device), soft_rows.repeat_interleave(soft_ids.shape[1])]
            )
            token_ids = torch.cat([batch.sampled_ids[start:end], soft_ids.flatten()])
            blocks.append(Block(start, end, rows, token_ids))
        found = selected_logprobs(hidden, output_layer.weight, output_layer.bias, blocks, self._temperature)
        sampled, candidates = [], []
        for logprobs, block, (first, last) in zip(found, blocks, pairwise(soft_limits), strict=True):
            own, of_soft_targets = logprobs.tensor_split([block.end - block.start])
            sampled.append(own)
            candidates.append(of_soft_targets.view(last - first, batch.soft_ids.shape[1]))
        return torch.cat(sampled), torch.cat(candidates)
