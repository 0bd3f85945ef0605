"""A vLLM plugin: the weight-transfer backend `gloo`, which works between CPUs, so that the protocol can be tested.

Sessions, loading and what an update says are those of vLLM's `nccl` backend; only the process group differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    group_name: str
    rank_offset: int
    world_size: int


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    init_info_cls = GlooInitInfo
    group: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rank, size = init_info.rank_offset + self.parallel_config.rank, init_info.world_size
        store, _, _ = next(c10d.rendezvous(f"tcp://{init_info.master_address}:{init_info.master_port}", rank, size))
        store = dist.PrefixStore(init_info.group_name, store)
        self.group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            dist.Backend("gloo"),
            store,
            group_name=init_info.group_name,
            timeout=c10d.default_pg_timeout,
        )
        c10d._world.pg_group_ranks[self.group] = {each: each for each in range(size)}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base's waits for a GPU too

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(weight, 0, group=self.group)
            self.model.load_weights([(name, weight)])

    def shutdown(self) -> None:
        self.group = None


def register() -> None:
    WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
