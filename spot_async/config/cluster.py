"""The schema of a run on several machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

import pydantic
from pydantic import Field

from spot_async.config.base import PositiveFloat, PositiveInt, Section


class ClusterConfig(Section):
    """The machines (nodes) that the trainer's ranks are spread over. Each runs the same command.

    What is not given is taken from the scheduler's environment variables (docs/distributed.md). With `kind: ray` the
    command is given once: node 0 is this machine, and Ray chooses the others.
    """

    DEVICE_GIB: ClassVar[float] = 80.0  # of the GPUs that the paper's recipes are for

    device_gib: PositiveFloat | None = Field(
        None,
        description="memory of each GPU, which `launch.memory_fraction` is a share of; default: as nvidia-smi says, "
        "else 80",
    )
    gpu: Literal["a800", "h100", "h200", "b200"] = Field(
        "a800", description="the kind of GPU whose speed that estimate assumes; an A100 is as fast as an A800"
    )
    kind: Literal["ray"] | None = Field(
        None,
        description="`ray`: Ray chooses the machines of servers with `launch.resources`, and of the trainer's other "
        "nodes; needs the package `ray`",
    )
    resources: dict[str, PositiveFloat] = Field(
        {},
        description="with kind=ray: what each of the trainer's nodes but this one takes of a machine, by Ray's names, "
        "such as `{GPU: 8, CPU: 32}`",
    )
    nodes: PositiveInt | None = Field(
        None, description="how many machines; default: as many as the scheduler says, else 1"
    )
    node_rank: int | None = Field(
        None, ge=0, description="this machine's number, from 0: node 0 has the run, its files and its servers"
    )
    address: str | None = Field(
        None,
        min_length=1,
        description="node 0's address or name, as the other nodes reach it; with kind=ray: HOST:PORT of Ray's head, "
        "default: $RAY_ADDRESS, else the cluster that this machine is a node of",
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="node 0 listens on this port; default: the scheduler's, else 29600",
    )
    secret_file: Path | None = Field(
        None,
        description="file with the run's secret, readable by its owner alone; default: $SPOT_ASYNC_CLUSTER_SECRET. Who "
        "does not know it cannot join. With kind=ray the run makes one where none is given",
    )
    run_id: str | None = Field(
        None, min_length=1, description="the same on all nodes of a run; tells runs apart that meet at one address"
    )
    join_timeout_s: PositiveFloat = Field(
        600.0, description="longest wait for all nodes, at the start and after one was lost"
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        60.0, description="a node that is silent for so long is lost: its machine or the network is down"
    )
    start_timeout_s: PositiveFloat = Field(
        30.0,
        description="with kind=ray: longest wait for Ray to find room; raise it where nodes are still to come",
    )

    @pydantic.model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "ray" and self.node_rank is not None:
            raise ValueError("node_rank: with kind=ray this machine is node 0: remove this key, or kind")
        if self.resources and (self.kind != "ray" or not self.placed_nodes):
            raise ValueError("resources: needs kind=ray, and nodes=2 or more")
        if self.placed_nodes and not self.resources:
            raise ValueError(f"nodes={self.nodes}: with kind=ray say in resources what each but this one takes")
        return self

    @property
    def placed_nodes(self) -> Sequence[int]:
        """Return the trainer's nodes that Ray places."""
        return range(1, self.nodes or 1) if self.kind == "ray" else ()
