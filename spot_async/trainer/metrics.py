"""The trainer's metrics, and the sums they are computed from. docs/metrics.md says what each means.

Every rank tallies its own micro-batches. The tallies are then summed over all ranks, and `Tally.report` makes metrics
of the sums. `Meters` measure how well the ranks use their devices. Tokens and arithmetic are counted from the shares of
a batch, and memory by torch's allocator, so no device is waited for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spot_async.base.processes.gpus import operations_per_s
from spot_async.config import TrainingConfig
from spot_async.models.model_size import read_size, training_operations
from spot_async.models.responses import counted_tokens
from spot_async.trainer.batching import MicroBatch, input_length
from spot_async.trainer.divergence import divergence_statistics
from spot_async.trainer.loss import mismatch_statistics, weight_statistics
from spot_async.trainer.messages import UpdateShare
from spot_async.trainer.parallel import Strategy

_MEANS = {  # by metric: the sum that it is of, and the one that this is divided by
    "ratio_mean": ("ratio", "policy_tokens"),
    "importance_weight_mean": ("importance_weight", "policy_tokens"),
    "importance_capped": ("importance_capped", "policy_tokens"),
    "clip_fraction": ("clipped_tokens", "policy_tokens"),
    "behavior_kl": ("behavior_kl", "policy_tokens"),
    "advantage_mean": ("advantage", "policy_tokens"),
    "pull_mean": ("pull", "pull_tokens"),
    "pull_clipped": ("pull_clipped", "pull_tokens"),
    "clipped_cells": ("clipped_cells", "cells"),
    "student_mass": ("student_mass", "divergences"),
    "teacher_mass": ("teacher_mass", "divergences"),
    "mismatch_mean": ("mismatch", "mismatch_tokens"),
    "mismatch_kl": ("mismatch_kl", "mismatch_tokens"),
    "staleness_mean": ("staleness", "staleness_tokens"),
    "staleness_kl": ("staleness_kl", "staleness_tokens"),
}
_SUMS = tuple(
    dict.fromkeys(
        [
            *itertools.chain(*_MEANS.values()),
            *("loss", "loss_policy", "loss_branch", "loss_reference", "loss_entropy"),
            *("trajectories", "tokens", "branch_positions", "sampled_tokens", "lag"),
            *("first_pull", "first_pull_tokens", "reverse_kl", "sampling_weight", "sampling_weight_squared"),
        ]
    )
)
# By what the largest is kept of: the sum that is 0 where there was none.
_MAXIMA = {"ratio": "policy_tokens", "mismatch": "mismatch_tokens", "lag": "lag", "staleness": "staleness_tokens"}
GIB = float(1 << 30)


class Tally:
    """Sums over an iteration's micro-batches, kept on the device so that adding to them never waits for it.

    `step` is that of the weights that the iteration starts from. Lags count from it.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        self.step = step
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    def add(self, **amounts: Tensor | float) -> None:
        """Add to sums by name (`_SUMS`). Sums not named stay the same."""
        for name, amount in amounts.items():
            self.sums[_SUMS.index(name)].add_(amount)  # a plain number goes with the kernel's call, and is not copied

    def see(self, **values: Tensor) -> None:
        """Raise maxima by name (`_MAXIMA`). Maxima not named stay the same."""
        row = [values[name].double() if name in values else self.maxima.new_zeros(()) for name in _MAXIMA]
        self.maxima = torch.maximum(self.maxima, torch.stack(row))

    def count_lag(self, batch: MicroBatch) -> None:
        """Count by how many steps the weights that sampled the tokens are older than the iteration's first ones."""
        is_sampled = batch.sampled_at >= 0
        lags = (self.step - batch.sampled_at).masked_fill(~is_sampled, 0)
        self.add(sampled_tokens=is_sampled.sum(), lag=lags.sum())
        self.see(lag=torch.cat([lags.flatten(), lags.new_zeros(1)]).max())

    @torch.no_grad()
    def count_distance(self, batch: MicroBatch, of_soft_targets: Sequence[Tensor]) -> None:
        """Count how far the student is from the models that pull it, and from the targets of divergences."""
        if len(batch.pulls.weights):
            pulls, behavior = batch.pulls, batch.behavior_logprobs
            active = pulls.weights != 0
            shares = pulls.shares(behavior)  # so that a chunk counts once
            differences, limited = shares * pulls.differences(behavior), shares * pulls.limited(behavior)
            self.add(
                pull_tokens=active.sum(),
                pull=limited.masked_fill(~active, 0.0).sum(),
                pull_clipped=((differences != limited) & active).sum(),
                first_pull_tokens=active[0].sum(),
                first_pull=differences[0].masked_fill(~active[0], 0.0).sum(),
            )
        if batch.has_divergences:
            self.add(**divergence_statistics(batch, *of_soft_targets))

    def count_mismatch(self, batch: MicroBatch, own: Tensor) -> None:
        """Compare the server's log-probabilities with the trainer's, which are of the iteration's first weights.

        The trainer's are the recomputed ones or, before the first step, those of the training pass itself. For tokens
        of the same weights the difference is that of engine and trainer. For tokens of older weights it is staleness.
        """
        is_stale = (batch.sampled_at >= 0) & (batch.sampled_at < self.step)
        self.add(**weight_statistics(own, batch.served_logprobs, batch.policy_mask))
        for name, which in (("mismatch", ~is_stale), ("staleness", is_stale)):
            found = mismatch_statistics(own, batch.served_logprobs, batch.policy_mask & which)
            self.add(**{f"{name}_tokens": found["tokens"], name: found["difference"], f"{name}_kl": found["kl"]})
            self.see(**{name: found["difference_max"]})

    def report(self, *, grad_norms: Sequence[float], learning_rate: float) -> dict[str, float]:
        """Return the metrics `train/...`, except times and means over nothing. `grad_norms` has one norm per update.

        It waits until the device has computed everything, the last optimiser step too.

        Lag, staleness and the effective sample size are left out where no token lags. In a strict run they could only
        say that it is strict.
        """
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        found = {name: sums[amount] / n for name, (amount, over) in _MEANS.items() if (n := sums[over])}
        found |= {f"{name}_max": maxima[name] for name, over in _MAXIMA.items() if sums[over]}
        if sums["first_pull_tokens"]:
            found["kl_to_teacher"] = -sums["first_pull"] / sums["first_pull_tokens"]
        elif sums["divergences"]:
            found["kl_to_teacher"] = sums["reverse_kl"] / sums["divergences"]
        if sums["lag"]:
            found["lag_mean"] = sums["lag"] / sums["sampled_tokens"]
        if sums["staleness_tokens"]:
            squares = (sums["mismatch_tokens"] + sums["staleness_tokens"]) * sums["sampling_weight_squared"]
            found["effective_sample_share"] = sums["sampling_weight"] ** 2 / squares
        if updates := len(grad_norms):
            found |= {name: sums[name] / updates for name in ("loss", "loss_policy", "loss_branch", "loss_reference")}
            if sums["loss_entropy"]:
                found["loss_entropy"] = sums["loss_entropy"] / updates
            found["grad_norm"] = sum(grad_norms) / updates
            found["branch_positions_per_trajectory"] = sums["branch_positions"] / sums["trajectories"]
        counts = {name: sums[name] for name in ("branch_positions", "trajectories", "tokens")}
        return {**found, **counts, "learning_rate": learning_rate, "updates": float(updates)}


class Meters:
    """One rank's meters. All ranks must read them alike."""

    def __init__(self, training: TrainingConfig, model_directory: Path, device: torch.device) -> None:
        self._training = training
        self._size = read_size(model_directory)  # None: the arithmetic of this architecture is not known
        self._device = device
        is_known = device.type == "cuda" and training.dtype == "bfloat16"
        self._peak = operations_per_s(torch.cuda.get_device_name(device)) if is_known else None

    def read(self, updates: Sequence[UpdateShare], strategy: Strategy, train_s: float) -> dict[str, float]:
        """Return the metrics `perf/...` of an iteration over all ranks, without what is not known of each of them.

        `updates` are this rank's shares. Peaks of memory begin anew.
        """
        peak = math.nan if self._peak is None else self._peak
        work = torch.tensor([*self._work(updates), peak], dtype=torch.float64, device=self._device)
        tokens, operations, peaks = strategy.sum(work).tolist()
        found = {}
        if tokens:
            found = {
                "tokens_per_s_per_rank": tokens / train_s / strategy.ranks,
                "tflops_per_rank": operations / train_s / strategy.ranks / 1e12,
                "mfu": operations / train_s / peaks,
            }
        if self._device.type == "cuda":
            memory = (torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
            largest = strategy.max(torch.tensor(memory, dtype=torch.float64, device=self._device)).tolist()
            allocated, reserved = (each / GIB for each in largest)
            found |= {"max_memory_allocated_gib": allocated, "max_memory_reserved_gib": reserved}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _work(self, updates: Sequence[UpdateShare]) -> tuple[int, float]:
        """Return the tokens that the student reads of a rank's shares, and the operations to train on them."""
        lengths = [[input_length(sample) for sample in update.samples.values()] for update in updates]
        tokens = sum(map(sum, lengths))
        if self._size is None:
            return tokens, math.nan
        operations = 0
        for number, (update, own) in enumerate(zip(updates, lengths, strict=True)):
            rows = sum(int(counted_tokens(sample).sum()) for sample in update.samples.values())
            recomputes = self._training.recomputes_apart(number) and update.old_logprobs is None
            operations += training_operations(
                self._size, own, rows, lora=self._training.lora, recomputes_behavior=recomputes
            )
        return tokens, operations
