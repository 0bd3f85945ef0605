"""Turns a batch of supervision into tensors: mini-batches, each rank's share, micro-batches, packed or padded.

Pure. Rank 0 divides a batch, and each rank makes tensors of its share. Nothing here runs the model or knows about
losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from spot_async.errors import TrainerError
from spot_async.models.alignment import decision_rows
from spot_async.models.chunks import SURE_NATS, UNKNOWN, whole_chunks
from spot_async.models.responses import counted_tokens
from spot_async.terms import policy_tokens
from spot_async.trainer.feed_check import check_arrays, sampled_spans
from spot_async.trainer.messages import UpdateShare
from spot_async.types import (
    LEAST_NATS,
    NO_TOKEN,
    BoolArray,
    Divergence,
    FloatArray,
    Int64Array,
    Live,
    LiveRows,
    SoftTargets,
    Supervision,
)

Array: TypeAlias = npt.NDArray[Any]  # ids, log-probabilities or a mask
DIVERGENCE_FIELDS = Divergence.__struct_fields__


def mini_batches(batch: Sequence[Supervision], prompts_per_update: int, seed: int) -> list[list[Supervision]]:
    """Split a batch into updates of at most `prompts_per_update` prompts, in an order drawn from `seed`.

    Trajectories of one prompt stay together. If prompts were left out, the updates share the others evenly, so that no
    update is a noisy step on a few samples. Without prompts there is no update.
    """
    by_prompt: dict[int, list[Supervision]] = {}
    for sample in sorted(batch, key=lambda sample: sample.prompt_ordinal):
        by_prompt.setdefault(sample.prompt_ordinal, []).append(sample)
    groups = list(by_prompt.values())
    if not groups:
        return []
    updates = -(-len(groups) // prompts_per_update)
    order = np.random.default_rng(seed).permutation(len(groups))
    return [[sample for i in part for sample in groups[i]] for part in np.array_split(order, updates)]


def input_length(sample: Supervision) -> int:
    """Return the number of tokens that the model reads. The last response token is not read: it decides nothing."""
    return len(sample.prompt_ids) + len(sample.response_ids) - 1


@dataclass(frozen=True)
class Layout:
    """How samples become rows. Packed ones are a single row, one behind another; padded ones have a row each."""

    is_packed: bool
    token_budget: int  # of one pass, padding included
    linear_work: int  # a token's work in linear layers, if that of attending to one other token is 2

    def shares(self, lengths: Sequence[int], ranks: int) -> list[list[int]]:
        """Return each rank's samples, longest first, as places in `lengths`."""
        longest_first = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        shares: list[list[int]] = [[] for _ in range(ranks)]
        if not self.is_packed:  # dealt back and forth, since passes are as long as their longest row
            for i, place in enumerate(longest_first):
                i %= 2 * ranks
                shares[min(i, 2 * ranks - 1 - i)].append(place)
            return shares
        work = [0] * ranks
        for place in longest_first:
            rank = work.index(min(work))
            shares[rank].append(place)
            work[rank] += self.work(lengths[place])
        return shares

    def work(self, length: int) -> int:
        """Return what a packed sample costs: linear layers for each token, attention for each pair of tokens."""
        return self.linear_work * length + length * length

    def passes(self, share: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Group a share, longest first, so that no group has more tokens than the budget, padding included.

        A sample longer than the budget is a group of its own.
        """
        groups: list[list[int]] = []
        room: list[int] = []
        for place in share:
            if self.is_packed:
                first = next((i for i, left in enumerate(room) if lengths[place] <= left), len(groups))
            else:  # rows are as long as the group's first
                is_full = not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > self.token_budget
                first = len(groups) - (not is_full)
            if first == len(groups):
                groups.append([])
                room.append(self.token_budget)
            groups[first].append(place)
            room[first] -= lengths[place]
        return groups


def input_of(sample: Supervision) -> bytes:
    """Return the tokens that a sample's log-probabilities are of."""
    return sample.prompt_ids.tobytes() + b"/" + sample.response_ids.tobytes()


def update_shares(
    mini_batch: Sequence[Supervision], ranks: int, layout: Layout, old: Mapping[bytes, FloatArray] | None = None
) -> list[UpdateShare]:
    """Return each rank's share of a mini-batch. `old` has log pi_old of each of its inputs.

    Every rank gets the same number of passes, because those of sharded ranks wait for each other. The last may be
    empty.
    """
    lengths = [input_length(sample) for sample in mini_batch]
    passes = [layout.passes(share, lengths) for share in layout.shares(lengths, ranks)]
    most = max(map(len, passes))
    names = tuple(map(name_of, mini_batch))
    tokens = sum(int(counted_tokens(sample).sum()) for sample in mini_batch)
    return [
        UpdateShare(
            names,
            tokens,
            samples={place: mini_batch[place] for group in own for place in group},
            passes=(*map(tuple, own), *[()] * (most - len(own))),
            old_logprobs={
                i: old[input_of(mini_batch[i])][counted_tokens(mini_batch[i])] for group in own for i in group
            }
            if old
            else None,
        )
        for own in passes
    ]


class Pulls(NamedTuple):
    """The pulls of B trajectories. J is the most that one has; what others lack has weight 0."""

    logprobs: Tensor  # (J, B, T); 0 where there is no policy term
    weights: Tensor  # (J, B, T)
    least: Tensor  # (J, B, 1) limits of the differences to log pi_old, in nats
    most: Tensor  # (J, B, 1)
    chunks: Tensor | None = None  # (J, B, T) int64: the place of the first token of each token's chunk; None: its own

    def differences(self, behavior_logprobs: Tensor) -> Tensor:
        """Return `log q - log pi_old` (J, B, T), of a token's whole chunk, without limits."""
        return self._sums(self.logprobs - behavior_logprobs)

    def limited(self, behavior_logprobs: Tensor) -> Tensor:
        """Return the differences (J, B, T) within their limits."""
        return self.differences(behavior_logprobs).clamp(self.least, self.most)

    def shares(self, behavior_logprobs: Tensor) -> Tensor:
        """Return which part of its chunk's difference a token gets (J, B, T), as `models.chunks.chunk_shares` says."""
        if self.chunks is None:
            return behavior_logprobs.new_ones(())
        own = behavior_logprobs.clamp(max=0.0).expand_as(self.logprobs)
        total, count = self._sums(own), self._sums(torch.ones_like(own))
        return torch.where(total < SURE_NATS, own / total.clamp(max=SURE_NATS), 1.0 / count)

    def _sums(self, values: Tensor) -> Tensor:
        """Return the sum of the values (J, B, T) in each token's chunk. In float64 their order does not matter."""
        if self.chunks is None:
            return values
        sums = torch.zeros_like(values, dtype=torch.float64).scatter_add(2, self.chunks, values.double())
        return sums.gather(2, self.chunks).to(values.dtype)


class SoftRows(NamedTuple):
    """The N soft targets of B trajectories, in the order of their decision rows. Rows may repeat."""

    rows: Tensor  # (N,) int64: indices into R, ascending
    trajectories: Tensor  # (N,) int64: indices into B
    token_ids: Tensor  # (N, k) int64; k is the widest target's, what others lack is filled with their first token
    is_token: Tensor  # (N, k) bool: false where it was filled
    probabilities: Tensor  # (N, k); 0 where it was filled
    tails: Tensor  # (N,) probability of all other tokens; 0 where the target has no tail
    has_tail: Tensor  # (N,) bool: the loss has a cell for all other tokens
    weights: Tensor  # (N,)
    is_divergence: Tensor  # (N,) bool: false for cross-entropies
    divergences: Tensor  # (N, 7): `DIVERGENCE_FIELDS`; clip is infinite where there is none


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B trajectories, with the R decision rows and N soft-target positions of all of them, in order.

    Their inputs are packed into one row of L tokens, or right-padded to the longest, L. T is the longest response; what
    is (B, T) is always padded. Padding is 0. B may be 0: then the model runs on one token of padding, and all gradients
    are zeros.
    """

    token_ids: Tensor  # (1, L) or (max(B, 1), L) int64
    position_ids: Tensor | None  # (1, L) int64, in each packed input from 0 on; None where inputs are padded
    input_lengths: tuple[int, ...]  # B of them, or the one token of padding
    input_ends: Tensor  # (B + 1,) int32: where packed inputs begin and end
    rows: Tensor  # (R,) int64: decision rows, of the (L, hidden) or (B * L, hidden) outputs
    sampled_ids: Tensor  # (R,) int64: the response tokens that those rows decided
    mask: Tensor  # (B, T) bool: true on response tokens that were not only read, R of them
    places: Tensor  # (R,) int64: of the response tokens in (B * T,)
    sampled_at: Tensor  # (B, T) int64: step of the weights that sampled the token; -1 where no student did
    policy_mask: Tensor  # (B, T) bool: response tokens with a policy term, which have a known advantage
    served_logprobs: Tensor  # (B, T) of the inference server; 0 where there is no policy term
    behavior_logprobs: Tensor  # (B, T) log pi_old in ratios and advantages: as served, or recomputed
    pulls: Pulls
    given_advantages: Tensor  # (B, T); 0 where the trajectory has none
    advantages: Tensor  # (B, T) given ones and pulls; 0 where there is no policy term
    reference_logprobs: Tensor  # (B, T); 0 where the trajectory has none
    entropy_bonus: Tensor  # (B, T); 0 where the trajectory has none
    soft: SoftRows
    # What the CPU knows of the soft targets, so that nobody has to wait for the device to learn it.
    soft_row_numbers: tuple[int, ...] = ()  # their rows
    soft_order: Int64Array | None = None  # (N,) where each stands among the trajectories' own, one behind another
    has_divergences: bool = False
    sums_tails: bool = False  # some loss needs the student's probability of all other tokens
    wants_entropies: bool = False  # some loss needs the student's entropy

    def to(self, device: torch.device) -> MicroBatch:
        """Return it on a device. Pinned memory is copied there without a wait for what the device computes."""
        if device.type == "cpu":
            return self

        def moved(each: Tensor) -> Tensor:
            return (each.pin_memory() if device.type == "cuda" else each).to(device, non_blocking=True)

        return replace(self, **{name: tree_map_only(Tensor, moved, each) for name, each in vars(self).items()})

    def in_places(self, values: Tensor) -> Tensor:
        """Return values (R,) of response tokens as (B, T), 0 on padding."""
        return values.new_zeros(self.mask.numel()).scatter(0, self.places, values).view(self.mask.shape)

    def with_behavior(self, logprobs: Tensor) -> MicroBatch:
        """Return the same trajectories with other log pi_old (B, T), and advantages recomputed from it."""
        behavior = logprobs.masked_fill(~self.policy_mask, 0.0)
        advantages = advantages_of(self.given_advantages, self.pulls, behavior)
        return replace(self, behavior_logprobs=behavior, advantages=advantages)

    def with_normalized_advantages(self, mean: Tensor, standard_deviation: Tensor) -> MicroBatch:
        """Return the same trajectories with advantages of mean 0 and standard deviation 1, over what the two are of."""
        normalized = ((self.advantages - mean) / standard_deviation).masked_fill(~self.policy_mask, 0.0)
        return replace(self, advantages=normalized)

    def without_soft_targets(self) -> MicroBatch:
        """Return the same trajectories for a pass that is asked for sampled tokens alone."""
        none = SoftRows(*(each[:0] for each in self.soft))
        return replace(
            self, soft=none, soft_row_numbers=(), has_divergences=False, sums_tails=False, wants_entropies=False
        )


def advantages_of(given: Tensor, pulls: Pulls, behavior_logprobs: Tensor) -> Tensor:
    """Return advantages (B, T): those given (B, T), and each pull's difference to log pi_old (B, T), weighted."""
    differences = pulls.shares(behavior_logprobs) * pulls.limited(behavior_logprobs)
    return given + (pulls.weights * differences).sum(dim=0)


def collate(samples: Sequence[Supervision], *, is_packed: bool) -> MicroBatch:
    """Pack or pad, and concatenate the trajectories of one micro-batch. There may be none."""
    inputs = [np.concatenate([s.prompt_ids, s.response_ids])[:-1] for s in samples] or [np.zeros(1)]
    counted = [counted_tokens(s) for s in samples]  # neither the output layer nor a loss sees the others
    input_lengths = tuple(map(len, inputs))
    longest = max(input_lengths)
    starts = np.cumsum([0, *input_lengths]) if is_packed else longest * np.arange(len(inputs))
    known = [policy_tokens(s) if s.has_policy_term else None for s in samples]
    width = max(map(len, counted), default=0)
    rows = [
        np.arange(longest)[decision_rows(len(s.prompt_ids), len(s.response_ids))][own]
        for s, own in zip(samples, counted, strict=True)
    ]
    mask = _padded(counted, width, np.bool_)
    served = _padded([_where(m, s.behavior_logprobs) for s, m in zip(samples, known, strict=True)], width, np.float32)
    given = _padded([_where(m, s.advantages) for s, m in zip(samples, known, strict=True)], width, np.float32)
    pulls = _collate_pulls(samples, known, width)
    return MicroBatch(
        token_ids=_joined(inputs)[None] if is_packed else _padded(inputs, longest, np.int64),
        position_ids=_joined([np.arange(n) for n in input_lengths])[None] if is_packed else None,
        input_lengths=input_lengths,
        input_ends=torch.from_numpy(np.cumsum([0, *input_lengths], dtype=np.int32)),
        rows=_joined([start + own for start, own in zip(starts, rows, strict=False)]),
        sampled_ids=_joined([s.response_ids[own] for s, own in zip(samples, counted, strict=True)]),
        mask=mask,
        places=mask.flatten().nonzero().flatten(),
        sampled_at=_padded([_steps(s) + 1 for s in samples], width, np.int64) - 1,
        policy_mask=_padded(known, width, np.bool_),
        served_logprobs=served,
        behavior_logprobs=served,
        pulls=pulls,
        given_advantages=given,
        advantages=advantages_of(given, pulls, served),
        reference_logprobs=_padded([s.reference_logprobs for s in samples], width, np.float32),
        entropy_bonus=_padded([s.entropy_bonus for s in samples], width, np.float32),
        wants_entropies=any(s.entropy_bonus is not None for s in samples),
        **_collate_soft_targets([s.soft_targets for s in samples], counted),
    )


def live_of(samples: Sequence[Supervision], batch: MicroBatch, *said: Tensor) -> list[Live]:
    """Return what the student said of each sample of a micro-batch, in float32, of all tokens alike (`told`).

    It is NaN of tokens that were only read. `said` is what `ResponseLogprobs` returns. Rows of soft targets come back
    in the samples' own order and width.
    """
    logprobs, entropies, candidates, tails = (each.cpu().numpy() for each in said)
    assert batch.soft_order is not None
    as_given = np.argsort(batch.soft_order)
    candidates, tails = candidates[as_given], tails[as_given]
    found, token, row = [], 0, 0
    for sample in samples:
        counted = counted_tokens(sample)
        own = slice(token, token := token + int(counted.sum()))
        of_tokens = np.full((2, len(counted)), np.nan, np.float32)
        of_tokens[:, counted] = logprobs[own], entropies[own]
        rows = []
        for each in sample.soft_targets:
            of_it = slice(row, row := row + len(each.positions))
            own_width = candidates[of_it, : each.token_ids.shape[1]].reshape(each.token_ids.shape)
            of_cells = np.where(each.token_ids == NO_TOKEN, np.float32(LEAST_NATS), own_width)
            rows.append(LiveRows(logprobs=of_cells, tail_logprobs=tails[of_it].copy()))
        where = policy_tokens(sample)
        found.append(Live(logprobs=of_tokens[0], entropy=of_tokens[1], where=where, rows=tuple(rows)))
    return found


def told(live: Live) -> Live:
    """Return what a policy is told: nothing of tokens that have no policy term."""
    known, entropy = (np.where(live.where, each, np.float32(np.nan)) for each in (live.logprobs, live.entropy))
    return msgspec.structs.replace(live, logprobs=known, entropy=entropy)


def _steps(sample: Supervision) -> Int64Array:
    """Return (T,) the step of the weights that sampled each token, or -1 where no student did."""
    steps = np.full(len(sample.response_ids), -1, np.int64)
    for span in sampled_spans(sample):
        steps[span.start : span.end] = span.version.step
    return steps


def _where(mask: BoolArray | None, values: FloatArray | None) -> FloatArray | None:
    """Return `values` where `mask` is true, else 0. An advantage of 0 gives no loss and no gradient at any ratio."""
    return None if mask is None or values is None else np.where(mask, values, 0)


def _joined(parts: Sequence[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64))


def _padded(rows: Sequence[Array | None], width: int, dtype: type) -> Tensor:
    padded: Array = np.zeros((len(rows), width), dtype)
    for i, row in enumerate(rows):
        if row is not None:
            padded[i, : len(row)] = row
    return torch.from_numpy(padded)


def _collate_pulls(samples: Sequence[Supervision], known: Sequence[BoolArray | None], width: int) -> Pulls:
    most = max((len(s.pulls) for s in samples), default=0)
    logprobs, weights = np.zeros((2, most, len(samples), width), np.float32)
    limits = np.full((2, most, len(samples), 1), np.inf, np.float32)
    limits[0] = -np.inf
    chunks = np.broadcast_to(np.arange(width), logprobs.shape).copy()
    for i, (sample, mask) in enumerate(zip(samples, known, strict=True)):
        for j, pull in enumerate(sample.pulls):
            here = j, i, slice(len(sample.response_ids))
            whole = None if mask is None else whole_chunks(mask, pull.chunks)
            logprobs[here] = _where(whole, pull.logprobs)
            weights[here] = _where(whole, np.ones_like(pull.logprobs) if pull.weights is None else pull.weights)
            if pull.clip is not None:
                limits[:, j, i, 0] = pull.clip
            if pull.chunks is not None:
                _, first, places = np.unique(pull.chunks, return_index=True, return_inverse=True)
                chunks[here] = np.where(pull.chunks == UNKNOWN, chunks[here], first[places])
    pulls = Pulls(*map(torch.from_numpy, (logprobs, weights, *limits)))
    has_chunks = any(pull.chunks is not None for sample in samples for pull in sample.pulls)
    return pulls._replace(chunks=torch.from_numpy(chunks)) if has_chunks else pulls


def _collate_soft_targets(targets: Sequence[Sequence[SoftTargets]], counted: Sequence[BoolArray]) -> dict[str, Any]:
    """Return the fields of `MicroBatch` that hold soft targets: of each trajectory, in the order of their positions."""
    present = [(i, each) for i, own in enumerate(targets) for each in own if len(each.positions)]
    width = max((each.token_ids.shape[1] for _, each in present), default=0)
    starts = np.cumsum([0, *(own.sum() for own in counted)])
    columns = [
        _columns(each, i, starts[i] + np.cumsum(counted[i])[each.positions] - 1, width) for i, each in present
    ] or [_columns(NO_TARGETS, 0, NO_TARGETS.positions, width)]
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    soft = SoftRows(*(torch.from_numpy(column[order]) for column in joined))
    return {
        "soft": soft,
        "soft_row_numbers": tuple(joined[0][order].tolist()),
        "soft_order": order,
        "has_divergences": any(each.divergence is not None for _, each in present),
        "sums_tails": bool(soft.has_tail.any()),
    }


def _columns(each: SoftTargets, trajectory: int, rows: Array, width: int) -> tuple[Array, ...]:
    """Return the arrays of `SoftRows` for one group of targets at `rows` (N,), filled up to `width` tokens."""
    count, k = each.token_ids.shape
    kind = each.divergence or Divergence()
    taught = each.probabilities if each.baselines is None else each.probabilities - each.baselines
    token_ids = np.pad(each.token_ids, ((0, 0), (0, width - k)), constant_values=NO_TOKEN)
    is_token = token_ids != NO_TOKEN
    numbers = [float("inf") if (value := getattr(kind, name)) is None else value for name in DIVERGENCE_FIELDS]
    return (
        rows.astype(np.int64),
        np.full(count, trajectory, np.int64),
        np.where(is_token, token_ids, each.token_ids[:, :1]).astype(np.int64),
        is_token,
        np.where(is_token, np.pad(taught, ((0, 0), (0, width - k))), 0.0).astype(np.float32),
        np.zeros(count, np.float32) if each.tails is None else each.tails,
        np.full(count, each.has_tail_cell),
        each.weights,
        np.full(count, each.divergence is not None),
        np.broadcast_to(np.array(numbers, np.float32), (count, len(numbers))),
    )


NO_TARGETS = SoftTargets(
    positions=np.zeros(0, np.int32),
    token_ids=np.zeros((0, 0), np.int32),
    probabilities=np.zeros((0, 0), np.float32),
    weights=np.zeros(0, np.float32),
)


def check_sample(sample: Supervision, *, vocab_size: int, needs_reference: bool) -> None:
    """Raise `TrainerError` naming the sample if its arrays do not fit together.

    Values are not checked. Numbers that are not finite are found by their effect on loss and gradient.
    """
    try:
        check_arrays(sample, vocab_size)
        if needs_reference and sample.reference_logprobs is None:
            raise ValueError("training.reference_kl is set but it has no reference_logprobs")
    except ValueError as found:
        raise TrainerError(f"sample {name_of(sample)} cannot be trained: {found}") from None


def name_of(sample: Supervision) -> str:
    """Return how errors name a sample."""
    return f"{sample.problem_id!r} (ordinal {sample.prompt_ordinal})"
