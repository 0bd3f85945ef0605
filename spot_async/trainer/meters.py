"""Measures how well the ranks use their devices: tokens a second, arithmetic, peak memory.

Tokens and arithmetic are counted from the shares of a batch, and memory by torch's allocator, so no device is waited
for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from spot_async.base.processes.gpus import gpu_named
from spot_async.config import TrainingConfig
from spot_async.models.arithmetic import training_operations
from spot_async.models.model_size import read_size
from spot_async.trainer.batching import input_length
from spot_async.trainer.messages import UpdateShare
from spot_async.trainer.parallel import Strategy

PERFORMANCE: dict[str, str] = {
    "tokens_per_s_per_rank": "tokens of prompts and responses trained, of all ranks / train_s / ranks; a rank is a GPU",
    "tflops_per_rank": "1e12 operations that training on them needs / train_s / ranks; see models/arithmetic.py",
    "mfu": "model FLOPs utilisation: these operations / train_s, as a share of the GPUs' dense bfloat16 rate",
    "max_memory_allocated_gib": "most that tensors took of a GPU since the iteration before, of the rank with most",
    "max_memory_reserved_gib": "most that torch held of it, likewise; with what it keeps for tensors to come",
}
GIB = float(1 << 30)


class Meters:
    """One rank's meters. All ranks must read them alike."""

    def __init__(self, training: TrainingConfig, model_directory: Path, device: torch.device) -> None:
        self._training = training
        self._size = read_size(model_directory)  # None: nobody has counted the arithmetic of this architecture
        self._device = device
        is_known = device.type == "cuda" and training.dtype == "bfloat16"
        self._sheet = gpu_named(torch.cuda.get_device_name(device)) if is_known else None

    def read(self, updates: Sequence[UpdateShare], strategy: Strategy, train_s: float) -> dict[str, float]:
        """Return `PERFORMANCE` of an iteration over all ranks, without what is not known of each of them.

        `updates` are this rank's shares. Peaks of memory begin anew.
        """
        peak = self._sheet.operations_per_s if self._sheet else math.nan
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
        samples = [sample for update in updates for sample in update.samples.values()]
        lengths = [input_length(sample) for sample in samples]
        if self._size is None:
            return sum(lengths), math.nan
        operations = training_operations(
            self._size,
            lengths,
            rows=sum(len(sample.response_ids) for sample in samples),
            lora=self._training.lora,
            recomputes_behavior=self._training.behavior == "recomputed",
        )
        return sum(lengths), operations
