"""The ranks' process group, and how the student is spread over it: `ReplicatedStrategy` or `ShardedStrategy`.

A `Strategy` is all that training asks of either. All ranks call it alike, and make as many forward and
backward passes, for sharded ones wait for each other in each layer. Gradients are summed, never
averaged: the loss already carries the mini-batch's denominators.
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

# Its functions keep the group of the moment as default arguments. Loading a model imports it: unless
# that finds it imported before there is a group, the group and its threads live on in those defaults.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spot_async.base.processes.child import exit_at_once
from spot_async.config import TrainingConfig
from spot_async.errors import ConfigError
from spot_async.trainer.batching import MicroBatch

Forward = Callable[[MicroBatch], tuple[Tensor, Tensor]]
Precision = Literal["float32", "bfloat16"]
Sharding = Literal["none", "fsdp2"]

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
def process_group(channel_directory: str, device: torch.device, sharding: Sharding) -> Iterator[None]:
    """The ranks' process group, which meets through a file: gloo for CPU tensors, NCCL for GPU tensors.

    A rank that is alone has none, for also then gloo would listen on a TCP port. Only FSDP asks for one all the same.

    On leaving, the last reference to the group must go, since only that joins gloo's threads. A thread that lives on
    may hold a tensor of the last collective. To release it the thread takes the interpreter's lock, and doing so while
    the interpreter ends aborts the process. After an error on a GPU the process ends at once instead.
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
            # Out of memory, say. Destroying NCCL's group would wait for the other ranks, who wait for this one in a
            # collective, and ending the interpreter might too: then nobody would hear of the error.
            sys.excepthook = exit_at_once
        else:
            dist.destroy_process_group()
            if error is not None:
                traceback.clear_frames(error.__traceback__)  # of a trainer that failed, which holds the group
            gc.collect()  # sharded modules hold it too, and are in cycles


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all() -> None:
    """Until all ranks are here."""
    if rank_count() > 1:
        dist.barrier()


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes on every rank. Raw bytes in a tensor: object collectives would pickle."""
    if rank_count() == 1:
        assert data is not None
        return data
    length = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(length, src=0)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if data is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of it where it is not sharded."""
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
        """Put `module`, float32 and on the CPU, onto the ranks' devices; returns its forward pass, in `dtype`.

        `layers` are the parts of it that need not all be there at a time. All ranks have read the same file.
        """

    @abstractmethod
    def reduce_gradients(self, module: nn.Module) -> None:
        """Sum gradients over ranks, unless the backward pass has done it."""

    def clip_grad_norm(self, module: nn.Module, max_norm: float) -> float:
        """Scale gradients to `max_norm` at most; returns their norm before that, of all ranks' parts together."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @abstractmethod
    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """All parameters and buffers by name. Collective; used on rank 0, elsewhere it may be empty."""

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


class ReplicatedStrategy(Strategy):
    """Every rank holds the whole student and its optimiser state, and steps it alike. bfloat16 is autocast."""

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
        """A parameter without a gradient on this rank contributes zeros."""
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

    A layer's parameters are gathered while it computes, in bfloat16 where that is the dtype. Embedding and output layer
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
        # DTensor's caches never let go of the mesh, and this registry, which only compiled code reads, would make the
        # mesh hold the group.
        getattr(mesh, "_pg_registry", {}).clear()
        policy = MixedPrecisionPolicy()
        if dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (*layers, module):  # each is whole on the device only until its parts are dealt out
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo and NCCL alike
        return module

    def reduce_gradients(self, module: nn.Module) -> None:
        """Done by the backward pass."""

    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """On rank 0, on the CPU; empty elsewhere. Tied parameters, gathered one by one, are made one tensor again."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = cast(dict[str, Tensor], get_model_state_dict(module, options=options))
        whole: dict[int, Tensor] = {}
        parts = module.state_dict(keep_vars=True)
        return {name: whole.setdefault(id(part), state[name]) for name, part in parts.items() if name in state}


def strategy_of(training: TrainingConfig) -> Strategy:
    """The one that `training.sharding` names."""
    return ShardedStrategy() if training.sharding == "fsdp2" else ReplicatedStrategy()
