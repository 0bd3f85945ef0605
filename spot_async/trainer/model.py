"""The student under training: computes log-probabilities of only the tokens that matter, and their gradients.

A vocabulary of 150,000 times a few thousand tokens makes gigabytes of logits. So only the decision rows of responses go
to the output layer, a bounded block at a time. How the model is loaded and spread over ranks is not decided here.

Autograd would make several arrays as large as the logits: for each gather's gradient, the normaliser's, their sum, and
each change of type. With a vocabulary of 150,000 those take most of a small student's step. The backward pass of
`selected_logprobs` makes one, a block of rows at a time. Logits and the layer's gradient are float32, whatever the
factors are: rounded to 16 bits, logits would be an eighth of a nat apart, and a sum of blocks' gradients would lose as
much with each block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from spot_async.config import TrainingConfig
from spot_async.errors import DataError
from spot_async.trainer.batching import MicroBatch
from spot_async.trainer.loading import decoder_layers
from spot_async.trainer.packing import Documents
from spot_async.trainer.parallel import factor_dtype

LEAST_TAIL_NATS = -1e4
LOGITS_PER_BLOCK = 1 << 27  # 512 MiB in float32: 883 rows of Qwen3's vocabulary; a few copies exist at once


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

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what the student says in float32, over its full vocabulary.

        These are log-probabilities of sampled tokens (R,), entropies in nats, (R,) if the batch `wants_entropies`, else
        (0,), log-probabilities of soft targets' tokens (N, k), and of all other tokens together, (N,) if the batch
        `sums_tails`, else (0,).
        """
        hidden = _hidden_states(self.student, batch).flatten(0, 1).index_select(0, batch.rows)  # (R, hidden)
        output_layer = self.student.get_output_embeddings()

        rows_per_block = max(1, LOGITS_PER_BLOCK // output_layer.weight.shape[0])
        limits = [0, *range(rows_per_block, len(hidden), rows_per_block), len(hidden)]  # one block even without rows
        soft_limits = [bisect_left(batch.soft_row_numbers, limit) for limit in limits]
        blocks = []
        for (start, end), (first, last) in zip(pairwise(limits), pairwise(soft_limits), strict=True):
            soft_rows, soft_ids = batch.soft.rows[first:last] - start, batch.soft.token_ids[first:last]
            rows = torch.cat(
                [torch.arange(end - start, device=hidden.device), soft_rows.repeat_interleave(soft_ids.shape[1])]
            )
            token_ids = torch.cat([batch.sampled_ids[start:end], soft_ids.flatten()])
            tail_rows, heads = (soft_rows, soft_ids) if batch.sums_tails else (None, None)
            blocks.append(Block(start, end, rows, token_ids, tail_rows, heads, batch.wants_entropies))
        found = selected_logprobs(hidden, output_layer.weight, output_layer.bias, blocks, self._temperature)
        sampled, entropies, candidates, of_tails = [], [], [], []
        for (logprobs, tail, entropy), block, (first, last) in zip(found, blocks, pairwise(soft_limits), strict=True):
            own, of_soft_targets = logprobs.tensor_split([block.end - block.start])
            sampled.append(own)
            entropies.append(entropy)
            candidates.append(of_soft_targets.view(last - first, batch.soft.token_ids.shape[1]))
            of_tails.append(tail)
        return torch.cat(sampled), torch.cat(entropies), torch.cat(candidates), torch.cat(of_tails)


class Block(NamedTuple):
    """Rows from `start` to `end` whose logits exist at one time, and M pairs of a row and a token, which may repeat.

    There may be Q rows that are asked for the probability of all tokens but some. They may repeat, too.
    """

    start: int
    end: int
    rows: Tensor  # (M,) int64, counted from `start`
    token_ids: Tensor  # (M,) int64
    tail_rows: Tensor | None = None  # (Q,) int64, counted from `start`
    head_ids: Tensor | None = None  # (Q, k) int64: the tokens left out of each tail; they may repeat
    wants_entropies: bool = False  # of its R rows

    def tails(self, values: Tensor, instead: float) -> Iterator[tuple[slice, Tensor]]:
        """Yield the tails' rows of `values` (R, V), no more at a time than the block has, with `instead` at heads."""
        assert self.tail_rows is not None
        assert self.head_ids is not None
        step = max(1, self.end - self.start)
        for first in range(0, len(self.tail_rows), step):
            here = slice(first, first + step)
            yield here, values[self.tail_rows[here]].scatter_(1, self.head_ids[here], instead)


def selected_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, blocks: Sequence[Block], temperature: float
) -> list[OfBlock]:
    """Return each block's `log_softmax(logits / temperature)[rows, token_ids]`, tails and entropies in float32.

    Logits are `hidden @ weight.T + bias`, of hidden states (R, H) and an output layer (V, H) and (V,). A tail is the
    log of the probability of all tokens but `head_ids`, summed over them: 1 minus the others' would be mere rounding
    where the model is sure. It is `LEAST_TAIL_NATS` where nothing is left.
    """
    found = _SelectedLogprobs.apply(hidden, weight, bias, blocks, temperature)  # type: ignore[no-untyped-call]
    return _by_block(found)


class OfBlock(NamedTuple):
    """What is found of a block, or the gradients of that."""

    selected: Tensor  # (M,)
    tails: Tensor  # (Q,)
    entropies: Tensor  # (R,), or (0,) of a block that does not want them


def _by_block(found: Sequence[Tensor]) -> list[OfBlock]:
    """Return what was found of each block, of all that was: first what is selected of each, and so on."""
    count = len(found) // len(OfBlock._fields)
    return [OfBlock(*found[i::count]) for i in range(count)]


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, blocks: Sequence[Block], temperature: float
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.blocks, ctx.temperature = factor_dtype(weight), blocks, temperature
        factors = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        selected, normalisers, tails, entropies, kept = [], [], [], [], None
        for block in blocks:
            logits = _logits(*factors, bias, block)
            scaled = _scaled(logits, temperature)
            normalisers.append(scaled.logsumexp(dim=-1))  # (R,)
            selected.append(scaled[block.rows, block.token_ids] - normalisers[-1][block.rows])
            tails.append(_tail_logprobs(scaled, block, normalisers[-1]))
            entropies.append(_entropies(scaled, block, normalisers[-1]))
            # A single block is not computed again: that would not lower the peak of memory.
            kept = logits if len(blocks) == 1 else None
            del logits, scaled  # before the next block's are made
        ctx.save_for_backward(hidden, weight, bias, kept, *normalisers, *tails, *entropies)
        return *selected, *tails, *entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, kept, *of_blocks = ctx.saved_tensors
        count = len(ctx.blocks)
        factors = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = of_bias = None
        given = _by_block([each / ctx.temperature for each in gradients])
        for i, block in reversed(list(enumerate(ctx.blocks))):
            logits = _logits(*factors, bias, block) if kept is None else kept
            normaliser, tails, entropies = of_blocks[i::count]
            of_logits = _gradient(logits, block, given[i], normaliser, tails, entropies, ctx.temperature)
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


def _tail_logprobs(scaled: Tensor, block: Block, normaliser: Tensor) -> Tensor:
    """Return the tails (Q,) of a block of logits (R, V), divided by temperature."""
    sums = [normaliser[:0]]
    if block.tail_rows is not None:
        for here, others in block.tails(scaled, -torch.inf):
            sums.append(others.logsumexp(dim=-1) - normaliser[block.tail_rows[here]])
    return torch.cat(sums).clamp(min=LEAST_TAIL_NATS)


def _entropies(scaled: Tensor, block: Block, normaliser: Tensor) -> Tensor:
    """Return the entropies of a block of logits (R, V), divided by temperature."""
    if not block.wants_entropies:
        return normaliser[:0]
    probabilities = torch.sub(scaled, normaliser[:, None]).exp_()
    nats: Tensor = torch.special.entr(probabilities, out=probabilities)
    return nats.sum(dim=-1)


def _gradient(
    logits: Tensor,
    block: Block,
    given: OfBlock,
    normaliser: Tensor,
    tails: Tensor,
    entropies: Tensor,
    temperature: float,
) -> Tensor:
    """Return the gradient (R, V) of a block's logits from those of what was found of it, divided by temperature."""
    of_row = torch.zeros_like(normaliser).index_add_(0, block.rows, given.selected)
    if block.tail_rows is not None:
        of_row.index_add_(0, block.tail_rows, given.tails)
    # d log p(v) / d logit(w) = [v = w] - p(w)
    scaled = _scaled(logits, temperature)
    of_logits = torch.sub(scaled, normaliser[:, None], out=None if scaled is logits else scaled).exp_()
    further = None
    if block.tail_rows is not None:  # d log tail / d logit(w) = [w in the tail] p(w) / tail - p(w)
        factors = torch.where(given.tails == 0, 0.0, given.tails * torch.exp(-tails))
        further = torch.zeros_like(of_logits)
        for here, others in block.tails(of_logits, 0.0):
            further.index_add_(0, block.tail_rows[here], others.mul_(factors[here, None]))
    if block.wants_entropies:  # d entropy / d logit(w) = -p(w) log p(w) - p(w) entropy
        of_entropies = torch.special.entr(of_logits).addcmul_(of_logits, entropies[:, None], value=-1)
        further = _added(further, of_entropies.mul_(given.entropies[:, None]))
    of_logits.mul_(-of_row[:, None])
    if further is not None:
        of_logits.add_(further)
    return of_logits.index_put_((block.rows, block.token_ids), given.selected, accumulate=True)


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
