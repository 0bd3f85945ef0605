"""Turns a batch of supervision into tensors: mini-batches, each rank's share, micro-batches, packed or padded.

Pure. Rank 0 divides a batch, and each rank makes tensors of its share. Nothing here runs the model or knows about
losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spot_async.errors import TrainerError
from spot_async.models.alignment import decision_rows
from spot_async.trainer.feed_check import check_arrays, sampled_spans
from spot_async.trainer.messages import UpdateShare
from spot_async.types import BoolArray, FloatArray, Int64Array, SoftTargets, Supervision

Array: TypeAlias = npt.NDArray[Any]  # ids, log-probabilities or a mask


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


def update_shares(mini_batch: Sequence[Supervision], ranks: int, layout: Layout) -> list[UpdateShare]:
    """Return each rank's share of a mini-batch.

    Every rank gets the same number of passes, because those of sharded ranks wait for each other. The last may be
    empty.
    """
    lengths = [input_length(sample) for sample in mini_batch]
    passes = [layout.passes(share, lengths) for share in layout.shares(lengths, ranks)]
    most = max(map(len, passes))
    names = tuple(map(name_of, mini_batch))
    tokens = sum(len(sample.response_ids) for sample in mini_batch)
    return [
        UpdateShare(
            names,
            tokens,
            samples={place: mini_batch[place] for group in own for place in group},
            passes=(*map(tuple, own), *[()] * (most - len(own))),
        )
        for own in passes
    ]


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
    mask: Tensor  # (B, T) bool: true on response tokens, R of them
    places: Tensor  # (R,) int64: of the response tokens in (B * T,)
    sampled_at: Tensor  # (B, T) int64: step of the weights that sampled the token; -1 where no student did
    policy_mask: Tensor  # (B, T) bool: response tokens with a policy term, which have a known advantage
    served_logprobs: Tensor  # (B, T) of the inference server; 0 where there is no policy term
    behavior_logprobs: Tensor  # (B, T) log pi_old in ratios and advantages: as served, or recomputed
    teacher_logprobs: Tensor  # (B, T); 0 where advantages are not computed from them
    follows_teacher: Tensor  # (B,) bool: advantages are teacher_logprobs - behavior_logprobs
    advantages: Tensor  # (B, T); 0 where there is no policy term
    reference_logprobs: Tensor  # (B, T); 0 where the trajectory has none
    soft_rows: Tensor  # (N,) int64: indices into R, ascending
    soft_row_numbers: tuple[int, ...]  # the same, on the CPU
    soft_trajectories: Tensor  # (N,) int64: indices into B
    soft_ids: Tensor  # (N, k) int64; k is the widest target's, narrower ones are filled with probability 0
    soft_probabilities: Tensor  # (N, k)
    soft_weights: Tensor  # (N,)
    soft_offsets: Tensor  # (N,); 0 where the target gives none

    def to(self, device: torch.device) -> MicroBatch:
        """Return it on a device. Pinned memory is copied there without a wait for what the device computes."""
        tensors = {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}
        if device.type == "cuda":
            tensors = {name: each.pin_memory() for name, each in tensors.items()}
        moved: dict[str, Any] = {name: each.to(device, non_blocking=True) for name, each in tensors.items()}
        return replace(self, **moved)

    def in_places(self, values: Tensor) -> Tensor:
        """Return values (R,) of response tokens as (B, T), 0 on padding."""
        return values.new_zeros(self.mask.numel()).scatter(0, self.places, values).view(self.mask.shape)

    def with_behavior(self, logprobs: Tensor) -> MicroBatch:
        """Return the same trajectories with other log pi_old (B, T), and advantages recomputed where they use it."""
        behavior = logprobs.masked_fill(~self.policy_mask, 0.0)
        follows = self.policy_mask & self.follows_teacher[:, None]
        advantages = torch.where(follows, self.teacher_logprobs - behavior, self.advantages)
        return replace(self, behavior_logprobs=behavior, advantages=advantages)


def advantages_of(sample: Supervision) -> FloatArray | None:
    """Return advantages (T,), given or teacher minus behaviour; None without a policy term."""
    if sample.teacher_logprobs is not None:
        return sample.teacher_logprobs - sample.behavior_logprobs
    return sample.advantages


def collate(samples: Sequence[Supervision], *, is_packed: bool) -> MicroBatch:
    """Pack or pad, and concatenate the trajectories of one micro-batch. There may be none."""
    inputs = [np.concatenate([s.prompt_ids, s.response_ids])[:-1] for s in samples] or [np.zeros(1)]
    input_lengths = tuple(map(len, inputs))
    longest = max(input_lengths)
    starts = np.cumsum([0, *input_lengths]) if is_packed else longest * np.arange(len(inputs))
    known = [_policy_mask(s) for s in samples]
    advantages = [_where(mask, advantages_of(s)) for s, mask in zip(samples, known, strict=True)]
    served = [_where(mask, s.behavior_logprobs) for s, mask in zip(samples, known, strict=True)]
    teacher = [_where(mask, s.teacher_logprobs) for s, mask in zip(samples, known, strict=True)]
    lengths = [len(s.response_ids) for s in samples]
    width = max(lengths, default=0)
    rows = [np.arange(longest)[decision_rows(len(s.prompt_ids), len(s.response_ids))] for s in samples]
    mask = _padded([np.ones(n) for n in lengths], width, np.bool_)
    return MicroBatch(
        token_ids=_joined(inputs)[None] if is_packed else _padded(inputs, longest, np.int64),
        position_ids=_joined([np.arange(n) for n in input_lengths])[None] if is_packed else None,
        input_lengths=input_lengths,
        input_ends=torch.from_numpy(np.cumsum([0, *input_lengths], dtype=np.int32)),
        rows=_joined([start + own for start, own in zip(starts, rows, strict=False)]),
        sampled_ids=_joined([s.response_ids for s in samples]),
        mask=mask,
        places=mask.flatten().nonzero().flatten(),
        sampled_at=_padded([_steps(s) + 1 for s in samples], width, np.int64) - 1,
        policy_mask=_padded(known, width, np.bool_),
        served_logprobs=_padded(served, width, np.float32),
        behavior_logprobs=_padded(served, width, np.float32),
        teacher_logprobs=_padded(teacher, width, np.float32),
        follows_teacher=torch.tensor([s.teacher_logprobs is not None for s in samples], dtype=torch.bool),
        advantages=_padded(advantages, width, np.float32),
        reference_logprobs=_padded([s.reference_logprobs for s in samples], width, np.float32),
        **_collate_soft_targets([s.soft_targets for s in samples], lengths),
    )


def _steps(sample: Supervision) -> Int64Array:
    """Return (T,) the step of the weights that sampled each token, or -1 where no student did."""
    steps = np.full(len(sample.response_ids), -1, np.int64)
    for span in sampled_spans(sample):
        steps[span.start : span.end] = span.version.step
    return steps


def _policy_mask(sample: Supervision) -> BoolArray | None:
    """Return (T,) true where the sample has an advantage; None without a policy term."""
    if sample.teacher_logprobs is None and sample.advantages is None:
        return None
    return np.ones(len(sample.response_ids), np.bool_) if sample.policy_mask is None else sample.policy_mask


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


def _collate_soft_targets(targets: Sequence[SoftTargets | None], lengths: Sequence[int]) -> dict[str, Any]:
    first_rows = np.cumsum([0, *lengths])
    present = [(i, t) for i, t in enumerate(targets) if t is not None and len(t.positions)]
    positions = sum(len(t.positions) for _, t in present)
    width = max((t.token_ids.shape[1] for _, t in present), default=0)
    rows, trajectories = np.zeros(positions, np.int64), np.zeros(positions, np.int64)
    ids, probabilities = np.zeros((positions, width), np.int64), np.zeros((positions, width), np.float32)
    weights, offsets = np.zeros(positions, np.float32), np.zeros(positions, np.float32)
    start = 0
    for i, target in present:
        here, k = slice(start, start + len(target.positions)), target.token_ids.shape[1]
        order = np.argsort(target.positions, kind="stable")
        rows[here], trajectories[here] = first_rows[i] + target.positions[order], i
        ids[here, :k], probabilities[here, :k] = target.token_ids[order], target.probabilities[order]
        weights[here] = target.weights[order]
        if target.offsets is not None:
            offsets[here] = target.offsets[order]
        start = here.stop
    return {
        "soft_rows": torch.from_numpy(rows),
        "soft_row_numbers": tuple(rows.tolist()),
        "soft_trajectories": torch.from_numpy(trajectories),
        "soft_ids": torch.from_numpy(ids),
        "soft_probabilities": torch.from_numpy(probabilities),
        "soft_weights": torch.from_numpy(weights),
        "soft_offsets": torch.from_numpy(offsets),
    }


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
