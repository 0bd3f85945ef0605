"""Saves checkpoints in a thread of each rank, while the student trains on.

Training has to wait for it only before it changes what is being written. On a CPU the thread reads the parameters and
moments themselves, so that no memory is needed: the next step computes its gradients meanwhile. The same holds for what
is offloaded to the CPU. From a GPU they are copied to the host first, and the next steps may be made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from spot_async.errors import TrainerError
from spot_async.trainer.checkpoint import held_tensors, write_checkpoint
from spot_async.trainer.parallel import Strategy, broadcast_bytes, idle_group, wait_for_all

# Called on the thread of each rank: the seconds it took, and why it failed, or "".
Done = Callable[[float, str], None]


class CheckpointSaver:
    """Saves one checkpoint at a time. All ranks call it alike."""

    def __init__(self, strategy: Strategy, device: torch.device, *, is_offloaded: bool = False) -> None:
        """`is_offloaded` says that something of the state rests on the CPU, whatever the device."""
        self._strategy = strategy
        self._reads_live_tensors = device.type == "cpu" or is_offloaded
        # The threads' collectives must not mix with those of training, and wait for the disk.
        self._group = idle_group()
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, done: Done) -> None:
        """Begin to save the state after `step` steps, once the checkpoint before is saved."""
        self.wait()
        tensors = held_tensors(step, model, optimizer, self._strategy)

        def save() -> None:
            started = time.perf_counter()
            reason = ""
            try:
                write_checkpoint(directory, tensors, self._strategy, self._agree)
            except TrainerError as error:
                reason = str(error)
            done(time.perf_counter() - started, reason)

        self._thread = threading.Thread(target=save, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Wait until the last checkpoint is saved, or could not be; return for how many seconds."""
        if self._thread is None:
            return 0.0
        started = time.perf_counter()
        self._thread.join()
        self._thread = None
        wait_for_all(self._group)  # a disk may take longer than a rank may wait while training
        return time.perf_counter() - started

    def wait_before_step(self) -> float:
        """Wait until parameters and moments may be changed; return for how many seconds."""
        return self.wait() if self._reads_live_tensors else 0.0

    def _agree(self, reason: str) -> str:
        """Return the reason of a rank that failed, the same on all ranks; "" if none did."""
        if self._group is None:
            return reason
        failed_rank = torch.tensor(self._strategy.rank if reason else -1)
        dist.all_reduce(failed_rank, op=dist.ReduceOp.MAX, group=self._group)
        source = int(failed_rank)
        if source < 0:
            return ""
        told = reason.encode() if self._strategy.rank == source else None
        return broadcast_bytes(told, source=source, group=self._group).decode()
