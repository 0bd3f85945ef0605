"""How the student is spread over ranks. Plain replication for now.

`Replicated` is the whole interface that training uses, so that sharding (FSDP2) can take its place:
`prepare` would shard the modules, `reduce_gradients` would be done by the backward pass,
`full_state_dict` would gather, and every rank would need the same number of micro-batches.
Gradients are summed, never averaged: the loss already carries the mini-batch's denominators.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions keep the group of the moment as default arguments. Loading a model imports it: unless
# that finds it imported before there is a group, the group and its threads live on in those defaults.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in its __all__

from spot_async.errors import ConfigError

# The orchestrator owns the deadlines: ranks wait for the next batch for as long as rollouts take.
COLLECTIVE_TIMEOUT = timedelta(days=30)


def rank_device() -> torch.device:
    """This rank's GPU where there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= devices:
        raise ConfigError(
            f"training.ranks={os.environ['WORLD_SIZE']} needs as many GPUs, but only {devices} are visible"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(channel_directory: str, device: torch.device) -> Iterator[None]:
    """The ranks' group, met through a file; CPU tensors by gloo, GPU tensors by NCCL.

    On leaving, the last reference to the group must go, for that is what joins gloo's threads. Such
    a thread may still hold a tensor of the last collective; releasing one takes the interpreter's
    lock, and a thread that asks for it while the interpreter ends aborts the process.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=FileStore(f"{channel_directory}/group", ranks),
        rank=int(os.environ["RANK"]),
        world_size=ranks,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes on every rank. Raw bytes in a tensor: object collectives would pickle."""
    if dist.get_world_size() == 1:
        assert data is not None
        return data
    length = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(length, src=0)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if data is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


class Replicated:
    """Every rank holds the whole student and its optimiser state, and steps it alike."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def prepare(self, model: nn.Module) -> nn.Module:
        """The module to train. All ranks have read the same file, so nothing is left to do."""
        return model

    def reduce_gradients(self, model: nn.Module) -> None:
        """Sum gradients over ranks; a rank without a sample contributes zeros."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        works = [dist.all_reduce(p.grad, async_op=True) for p in parameters] if self.ranks > 1 else []
        for work in works:
            work.wait()

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        """Scale gradients to `max_norm` at most; returns their norm before that."""
        return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """All parameters and buffers by name. Collective; used on rank 0."""
        return model.state_dict()

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, in place."""
        dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values
