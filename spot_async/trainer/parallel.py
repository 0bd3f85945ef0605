"""The ranks' process group, and how the student is spread over it: by a `Strategy`, or a `ShardedStrategy`.

All ranks call a `Strategy` alike, and make the same number of forward and backward passes, because sharded ranks wait
for each other in each layer. Gradients are summed, never averaged: the loss already has the mini-batch's denominators.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

# This module's functions keep the current group as default arguments. Loading a model imports it too. Import it before
# there is a group, or the group and its threads live on in those defaults.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spot_async.base.addresses import LOOPBACK
from spot_async.base.processes.exits import exit_at_once
from spot_async.base.processes.gpus import VISIBLE, GpuSoftware, instance_refusal
from spot_async.config import TrainingConfig
from spot_async.errors import ConfigError
from spot_async.trainer.batching import MicroBatch
from spot_async.trainer.groups import Ranks
from spot_async.trainer.messages import NODES_VARIABLE, STORE_PORT_VARIABLE

Forward = Callable[[MicroBatch], tuple[Tensor, Tensor, Tensor, Tensor]]
Precision = Literal["float32", "bfloat16"]
Sharding = Literal["none", "fsdp2"]

# Of collectives while ranks train: so long may a rank that hangs go unnoticed.
TRAINING_TIMEOUT = timedelta(minutes=10)
# Of groups whose ranks wait for the next batch, as long as rollouts take, or for a disk. Deadlines are the
# orchestrator's.
IDLE_TIMEOUT = timedelta(days=30)


class RankPlace(NamedTuple):
    """Which rank of how many this process is."""

    rank: int
    ranks: int
    nodes: int


def rank_place() -> RankPlace:
    """Return where this process is, from its environment."""
    nodes = int(os.environ.get(NODES_VARIABLE, "1"))
    return RankPlace(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), nodes)


def rank_device(choice: Literal["auto", "cuda", "cpu"] = "auto", needs_gpu: str | None = None) -> torch.device:
    """Return this rank's GPU, or the CPU if there are no GPUs. `needs_gpu` says what asks for one, if anything does.

    Raises `ConfigError` if there is none then, or too few for the ranks of this machine.

    torch alone can say whether there are GPUs: an old driver may serve a newer CUDA by a compatibility package.
    """
    if choice == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if needs_gpu is not None:
            raise ConfigError(GpuSoftware.found().refusal(needs_gpu))
        return torch.device("cpu")
    local_rank, devices, place = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count(), rank_place()
    # Its name is such as `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    if place.ranks > 1 and " MIG " in torch.cuda.get_device_name(min(local_rank, devices - 1)):
        raise ConfigError(instance_refusal(place.ranks))
    if local_rank >= devices:
        on = "" if place.nodes == 1 else f" on {place.nodes} nodes"
        raise ConfigError(f"training.ranks={place.ranks}{on} needs as many GPUs, but only {devices} are visible")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # It plans attention anew for each length of a document: 1.3 s of an update (benchmarks/README.md).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def device_words(device: torch.device) -> str:
    """Return what this rank computes on and with, for the log."""
    software = GpuSoftware.found().words
    if device.type == "cpu":
        return f"on the CPU ({torch.backends.cpu.get_cpu_capability()}, {software})"
    visible = os.environ.get(VISIBLE)
    among = "" if visible is None else f" of {VISIBLE}={visible}"
    return f"on GPU {device.index}{among}, {torch.cuda.get_device_name(device)} ({software})"


@contextmanager
def process_group(channel_directory: str, device: torch.device, sharding: Sharding) -> Iterator[None]:
    """Make the ranks' process group: gloo for CPU tensors, NCCL for GPU tensors.

    Ranks of one node meet through a file, those of several at a store of rank 0's, to which other nodes have a tunnel.

    A single rank has no group, because gloo would listen on a TCP port even then. Only FSDP needs one all the same.

    On leaving, the last reference to the group must go, because only that joins gloo's threads. A thread that lives on
    may hold a tensor of the last collective. To release the tensor it takes the interpreter's lock, which aborts the
    process if the interpreter is already ending. After an error on a GPU the process ends at once instead.
    """
    place = rank_place()
    if place.ranks == 1 and sharding == "none":
        yield
        return
    store, attempts = _meeting_place(channel_directory, place), itertools.count()

    def world() -> dist.ProcessGroup:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore(f"world {next(attempts)}", store),
            rank=place.rank,
            world_size=place.ranks,
            timeout=TRAINING_TIMEOUT,
        )
        return cast(dist.ProcessGroup, dist.group.WORLD)

    Ranks(store, place.rank, place.ranks).form(world, lambda made: [made])
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


def _meeting_place(channel_directory: str, place: RankPlace) -> Store:
    if place.nodes == 1:
        return FileStore(f"{channel_directory}/group", place.ranks)
    port, is_host = int(os.environ[STORE_PORT_VARIABLE]), place.rank == 0
    # By itself torch would listen on every interface.
    listening = socket.create_server((LOOPBACK, port)).detach() if is_host else None
    return TCPStore(
        LOOPBACK, port, place.ranks, is_master=is_host, timeout=TRAINING_TIMEOUT, master_listen_fd=listening
    )


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def idle_group() -> dist.ProcessGroup | None:
    """Return a new group of all ranks that may wait in it without a deadline; None if there is only one rank."""
    if rank_count() == 1:
        return None

    def idle() -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT))

    return Ranks.of_the_world().form(idle, lambda group: [group])


def wait_for_all(group: dist.ProcessGroup | None) -> None:
    """Wait until all ranks call this, with the group that they have for it."""
    if group is not None:
        dist.barrier(group)


def send_bytes(data: bytes, rank: int, group: dist.ProcessGroup | None) -> None:
    """Send bytes to another rank, in a tensor, because object collectives would pickle."""
    dist.send(torch.tensor([len(data)]), dst=rank, group=group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=rank, group=group)


def receive_bytes(group: dist.ProcessGroup | None, rank: int = 0) -> bytes:
    """Wait for bytes of another rank."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, src=rank, group=group)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(buffer, src=rank, group=group)
    return buffer.numpy().tobytes()


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, which is all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that all ranks gather if it is sharded; all of them must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def offsets(tensor: Tensor) -> list[int]:
    """Return where in the whole tensor this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    (chunk,) = cast(Any, tensor).__create_chunk_list__()
    return list(chunk.offsets)


def factor_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type in which matrix products take a tensor: autocast's, or else its own."""
    kind = tensor.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else tensor.dtype


class Strategy:
    """How the student is spread over the ranks: each holds all of it and of its optimiser state, and makes each step.

    bfloat16 is by autocast. Each node has a whole student, so the first node's ranks can save it, and load it for all.
    """

    def __init__(self) -> None:
        self.rank = this_rank()
        self.ranks = rank_count()
        self.nodes = rank_place().nodes if self.ranks > 1 else 1
        self.ranks_of_node = self.ranks // self.nodes

    @property
    def is_on_first_node(self) -> bool:
        return self.rank < self.ranks_of_node

    def copy_from_first_node(self, tensors: Iterable[Tensor]) -> None:
        """Give the other nodes' ranks what the first node's hold, in place. All ranks must call it."""
        if self.nodes == 1:
            return
        alike = [range(first, self.ranks, self.ranks_of_node) for first in range(self.ranks_of_node)]
        groups = Ranks.of_the_world().form(lambda: [dist.new_group(ranks) for ranks in alike], lambda made: made)
        source = self.rank % self.ranks_of_node
        for tensor in tensors:
            if (part := local(tensor)).numel():
                dist.broadcast(part, src=source, group=groups[source])
        for group in groups:
            dist.destroy_process_group(group)

    def prepare(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        dtype: Precision,
        fill: Callable[[torch.device], None],
    ) -> Forward:
        """Put `module` onto the ranks' devices; return its forward pass in `dtype`.

        `layers` are the parts that may be gathered one at a time. `fill` gives parameters on the meta device their
        values, on the device it is given, once it is known what this rank holds of them.
        """
        fill(device)
        module.to(device)

        def forward(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                logprobs: tuple[Tensor, Tensor, Tensor, Tensor] = module(batch)
                return logprobs

        return forward

    def before_pass(self, *, is_last: bool) -> None:
        """Prepare for one of an update's forward and backward passes; `is_last` says that no more of them follow."""

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over ranks. A parameter without a gradient on this rank adds zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        works = [dist.all_reduce(p.grad, async_op=True) for p in parameters] if self.ranks > 1 else []
        for work in works:
            work.wait()

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale gradients down to `max_norm`; return their norm before that, over all ranks' parts together."""
        return float(whole(nn.utils.clip_grad_norm_(parameters, max_norm)))

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


class ShardedStrategy(Strategy):
    """FSDP2: every rank holds its part of parameters, gradients and optimiser state, all in float32.

    The parts are of the ranks of a node, so that layers are gathered inside it. Between nodes only gradients travel,
    once an update, with its last pass.
    A layer's parameters are gathered while it computes, in bfloat16 if that is the dtype. Embedding and output layer
    stay gathered from the forward pass to the end of the backward pass. The backward pass also sums gradients.

    With `keeps_on_cpu` the parts rest on the CPU, and the optimiser steps them there: a layer comes to the device when
    it computes, and its gradients leave it once they are summed.
    """

    def __init__(self, *, keeps_on_cpu: bool = False) -> None:
        super().__init__()
        self._keeps_on_cpu = keeps_on_cpu

    def prepare(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        dtype: Precision,
        fill: Callable[[torch.device], None],
    ) -> Forward:
        if not layers:
            raise ConfigError(
                "training.sharding=fsdp2: the student's architecture marks no layers to be gathered one by one, "
                "so each rank would hold all of it: set training.sharding=none"
            )
        if self.nodes == 1:
            mesh = init_device_mesh(device.type, (self.ranks,))
        else:
            shape, names = (self.nodes, self.ranks_of_node), ("nodes", "ranks of a node")
            mesh = Ranks.of_the_world().form(
                lambda: init_device_mesh(device.type, shape, mesh_dim_names=names), lambda made: made.get_all_groups()
            )
        # DTensor's caches keep the mesh for ever, and the mesh would keep the group through this registry. Only
        # compiled code reads it, so it can be emptied.
        getattr(mesh, "_pg_registry", {}).clear()
        policy = MixedPrecisionPolicy()
        if dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # Pinned memory is copied while the device computes. Without a GPU there is none.
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if self._keeps_on_cpu else OffloadPolicy()
        for unit in (*layers, module):  # one by one, so that the device never holds the whole student
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # so that gloo and NCCL do the same
        fill(torch.device("cpu") if self._keeps_on_cpu else device)
        self._module = sharded  # the last one is the whole
        return module

    def before_pass(self, *, is_last: bool) -> None:
        """Let gradients travel between nodes with the last pass. Those that leave the device go with each pass."""
        if self.nodes > 1 and not self._keeps_on_cpu:
            self._module.set_requires_all_reduce(is_last)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: the backward pass has summed them."""


def strategy_of(training: TrainingConfig) -> Strategy:
    """Return the strategy that `training.sharding` names."""
    if training.sharding == "fsdp2":
        return ShardedStrategy(keeps_on_cpu=training.offload == "all")
    return Strategy()
