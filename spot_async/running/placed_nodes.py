"""Runs the trainer's other nodes in the places that Ray gave them (`ray_places.py`), for as long as the run lasts.

In each place is an agent: what a node's own command would be elsewhere. One that ends is started again, in its place or
where Ray has moved that. How nodes join and what is done when one is lost is in `trainer/nodes/`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.far_side import FarProgram
from spot_async.base.tasks import alongside
from spot_async.config import ClusterConfig
from spot_async.errors import ProcessDiedError
from spot_async.trainer.nodes.authentication import SECRET_VARIABLE
from spot_async.trainer.nodes.joined import JoinedNodes
from spot_async.trainer.nodes.joining import agent_command

PAUSE_S = 2.0  # before an agent that has ended is started again


@dataclass(frozen=True)
class PlacedNode:
    """One of the nodes."""

    node_rank: int
    prefix: Sequence[str]  # what leads to its place
    nodes: JoinedNodes  # whom it joins
    cluster: ClusterConfig
    logs: Path

    async def keep(self) -> None:
        """Run the agent for ever. Raises `ProcessDiedError` if it ends before the trainer has begun."""
        topology = replace(self.nodes.topology, node_rank=self.node_rank)
        command = agent_command(topology, self.cluster)
        program = FarProgram(
            self.prefix,
            sys.executable,
            command,
            {SECRET_VARIABLE: topology.secret.value.decode()},
            self.cluster.heartbeat_timeout_s,
        )
        name = f"node-{self.node_rank}"
        while True:
            agent = await ChildProcess.start_far(name, program, log_path=self.logs / f"{name}.log")
            try:
                await agent.watch()
            except ProcessDiedError as died:
                if not self.nodes.have_begun:
                    raise
                structlog.get_logger().warning("node's agent ended", node=self.node_rank, reason=str(died))
            finally:
                await agent.stop()
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def placed_nodes(
    nodes: JoinedNodes | None, prefixes: Mapping[int, Sequence[str]], cluster: ClusterConfig, directory: Path
) -> AsyncIterator[None]:
    """Run the nodes that have a place while inside. They end with it; `nodes` should have told them before."""
    made = [
        PlacedNode(node_rank, prefix, nodes, cluster, directory / "logs")
        for node_rank, prefix in prefixes.items()
        if nodes is not None
    ]
    async with alongside(*(each.keep for each in made)):
        yield
