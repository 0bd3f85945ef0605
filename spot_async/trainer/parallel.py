"""The ranks' process group, and how the student is spread over it: `ReplicatedStrategy` or `ShardedStrategy`.

All ranks call a `Strategy` alike, and make the same number of forward and backward passes, because sharded ranks wait
for each other in each layer. Gradients are summed, never averaged: the loss already has the mini-batch's denominators.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist

# This module's functions keep the current group as default arguments. Loading a model imports it too. Import it before
# there is a group, or the group and its threads live on in those defaults.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spot_async.base.processes.exits import exit_at_once
from spot_async.config import TrainingConfig
from spot_async.errors import ConfigError
from spot_async.trainer.batching import MicroBatch

Forward = Callable[[MicroBatch], tuple[Tensor, Tensor]]
Precision = Literal["float32", "bfloat16"]
Sharding = Literal["none", "fsdp2"]

# Ranks wait for the next batch for as long as rollouts take. Deadlines are the orchestrator's.
COLLECTIVE_TIMEOUT = timedelta(days=30)


def rank_device() -> torch.device:
    """Return this rank's GPU, or the CPU if there are no GPUs."""
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
def process_group(channel_directory: str, device: torch.device, sharding: Sharding) -> Iterator[None]:
    """Make the ranks' process group: gloo for CPU tensors, NCCL for GPU tensors. Ranks meet through a file.

    A single rank has no group, because gloo would listen on a TCP port even then. Only FSDP needs one all the same.

    On leaving, the last reference to the group must go, because only that joins gloo's threads. A thread that lives on
    may hold a tensor of the last collective. To release the tensor it takes the interpreter's lock, which aborts the
    process if the interpreter is already ending. After an error on a GPU the process ends at once instead.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks == 1 and sharding == "none":
        yield
        return
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
        if (error := sys.exception()) is not None and device.type == "cuda":
            # For example out of memory. To destroy NCCL's group would wait for the other ranks, which wait for this one
            # in a collective. So might the interpreter's end. Then nobody would learn of the error.
            sys.excepthook = exit_at_once
        else:
            dist.destroy_process_group()
            if error is not None:
                traceback.clear_frames(error.__traceback__)  # the failed trainer's frames refer to the group
            gc.collect()  # so do sharded modules, which are in cycles


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all() -> None:
    """Wait until all ranks call this."""
    if rank_count() > 1:
        dist.barrier()


def broadcast_bytes(data: bytes | None, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the bytes of rank `source` on every rank. The others give None. By default the group is that of all ranks.

    Bytes travel in a tensor, because object collectives would pickle.
    """
    if rank_count() == 1:
        assert data is not None
        return data
    length = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(length, src=source, group=group)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if data is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=source, group=group)
    return buffer.numpy().tobytes()


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, which is all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Strategy(ABC):
    """How the student is spread over the ranks."""

    def __init__(self) -> None:
        self.rank = this_rank()
        self.ranks = rank_count()

    @abstractmethod
    def prepare(
        self, module: nn.Module, layers: Sequence[nn.Module], device: torch.device, dtype: Precision
    ) -> Forward:
        """Put `module`, float32 and on the CPU, onto the ranks' devices; return its forward pass in `dtype`.

        `layers` are the parts that may be gathered one at a time. All ranks have read the module from the same file.
        """

    @abstractmethod
    def reduce_gradients(self, module: nn.Module) -> None:
        """Sum gradients over ranks, unless the backward pass has done it."""

    def clip_grad_norm(self, module: nn.Module, max_norm: float) -> float:
        """Scale gradients down to `max_norm`; return their norm before that, over all ranks' parts together."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @abstractmethod
    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return all parameters and buffers by name on rank 0. All ranks must call it; others may get nothing."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum element-wise over ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the element-wise maximum over ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


class ReplicatedStrategy(Strategy):
    """Every rank holds the whole student and its optimiser state, and makes the same steps. bfloat16 is by autocast."""

    def prepare(
        self, module: nn.Module, layers: Sequence[nn.Module], device: torch.device, dtype: Precision
    ) -> Forward:
        module.to(device)

        def forward(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                logprobs: tuple[Tensor, Tensor] = module(batch)
                return logprobs

        return forward

    def reduce_gradients(self, module: nn.Module) -> None:
        """Sum gradients over ranks. A parameter without a gradient on this rank adds zeros."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        works = [dist.all_reduce(p.grad, async_op=True) for p in parameters] if self.ranks > 1 else []
        for work in works:
            work.wait()

    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        return module.state_dict()


class ShardedStrategy(Strategy):
    """FSDP2: every rank holds its part of parameters, gradients and optimiser state, all in float32.

    A layer's parameters are gathered while it computes, in bfloat16 if that is the dtype. Embedding and output layer
    stay gathered from the forward pass to the end of the backward pass. The backward pass also sums gradients.
    """

    def prepare(
        self, module: nn.Module, layers: Sequence[nn.Module], device: torch.device, dtype: Precision
    ) -> Forward:
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(f"training.sharding=fsdp2 needs torch 2.8 or newer, this is {torch.__version__}")
        if not layers:
            raise ConfigError(
                "training.sharding=fsdp2: the student's architecture marks no layers to be gathered one by one, "
                "so each rank would hold all of it: set training.sharding=none"
            )
        mesh = init_device_mesh(device.type, (self.ranks,))
        # DTensor's caches keep the mesh for ever, and the mesh would keep the group through this registry. Only
        # compiled code reads it, so it can be emptied.
        getattr(mesh, "_pg_registry", {}).clear()
        policy = MixedPrecisionPolicy()
        if dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (*layers, module):  # one by one, so that the device never holds the whole student
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # so that gloo and NCCL do the same
        return module

    def reduce_gradients(self, module: nn.Module) -> None:
        """Do nothing: the backward pass has summed them."""

    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return all tensors on rank 0, on the CPU. Tied parameters are gathered apart, and made one tensor again."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = cast(dict[str, Tensor], get_model_state_dict(module, options=options))
        whole: dict[int, Tensor] = {}
        parts = module.state_dict(keep_vars=True)
        return {name: whole.setdefault(id(part), state[name]) for name, part in parts.items() if name in state}


def strategy_of(training: TrainingConfig) -> Strategy:
    """Return the strategy that `training.sharding` names."""
    return ShardedStrategy() if training.sharding == "fsdp2" else ReplicatedStrategy()
