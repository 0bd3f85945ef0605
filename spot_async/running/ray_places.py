"""Asks Ray where a run's servers and the trainer's other nodes should be, and says how each place is reached.

A server with `launch.resources` gets a prefix that leads to its place (`ray_shell.py`), and the address of its node as
`host`. From then on it is like any other server behind a prefix. At each place of a trainer's node runs an agent, which
is started again when it ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from spot_async.base.processes import ray_shell
from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.exits import SAFE_PATH
from spot_async.base.processes.far_side import FarPlace
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.processes.ray_helper import ANSWER, SHELLS, Placed, Request
from spot_async.base.tasks import Loop, alongside, while_alive
from spot_async.config import ClusterConfig, ModelConfig, resources_of
from spot_async.errors import ConfigError, ProcessDiedError
from spot_async.trainer.nodes.authentication import SECRET_VARIABLE
from spot_async.trainer.nodes.joined import JoinedNodes
from spot_async.trainer.nodes.joining import agent_command

HELPER = "spot_async.base.processes.ray_helper"
CONNECT_TIMEOUT_S = 120.0  # for Ray to let us in
ANSWER_BYTES = 1 << 17


@dataclass(frozen=True)
class RayPlaces:
    """What is served, with each server's place, and the places of nodes."""

    served: Mapping[str, ModelConfig]
    nodes: Mapping[int, Sequence[str]]  # by a trainer node's number, the prefix that leads to its place
    watches: Sequence[Loop] = ()  # of the helper that holds all of them, if one was needed


@asynccontextmanager
async def placed(
    served: Mapping[str, ModelConfig], cluster: ClusterConfig, directory: Path, nodes: Sequence[int] = ()
) -> AsyncIterator[RayPlaces]:
    """Have Ray choose where servers with `launch.resources` and the trainer's `nodes` should be.

    Raises `ConfigError` for what it cannot place.
    """
    own = {f"trainer node {node}": dict(cluster.resources) for node in nodes}
    request = Request(cluster.address or "auto", resources_of(served), cluster.join_timeout_s, own)
    if not request.asked or cluster.kind != "ray":
        yield RayPlaces(served, {})
        return
    with private_directory("spot-ray-") as sockets, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as answers:
        answers.setblocking(False)
        answers.bind(str(sockets / ANSWER))
        helper = await ChildProcess.start(
            "ray",
            [sys.executable, "-m", HELPER, msgspec.json.encode(request).decode(), str(sockets)],
            log_path=directory / "logs" / "ray.log",
            environment={name: value for name, value in os.environ.items() if name.startswith("RAY_")},
        )
        try:
            addresses = await _answer(helper, answers, cluster)
            shells = sockets / SHELLS
            prefixes = {node: place_prefix(shells, len(request.servers) + n) for n, node in enumerate(nodes)}
            yield RayPlaces(with_places(served, addresses, shells), prefixes, [helper.watch])
        finally:
            await helper.stop()


async def _answer(helper: ChildProcess, answers: socket.socket, cluster: ClusterConfig) -> Mapping[str, str]:
    """Return the address of each place."""
    receiving = asyncio.get_running_loop().sock_recv(answers, ANSWER_BYTES)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S + cluster.join_timeout_s):
            answer = msgspec.json.decode(await while_alive(receiving, helper.watch), type=Placed)
    except TimeoutError:
        raise ProcessDiedError(f"no answer from Ray (log: {helper.log_path})") from None
    if answer.problem is not None:
        raise ConfigError(answer.problem)
    return answer.addresses


def place_prefix(shells: Path, number: int) -> list[str]:
    """Return the command that runs a shell in a place."""
    return [sys.executable, "-I", "-S", ray_shell.__file__, str(shells), str(number)]


def with_places(
    served: Mapping[str, ModelConfig], addresses: Mapping[str, str], shells: Path
) -> Mapping[str, ModelConfig]:
    """Return the models with a prefix and a host for each server that has a place. Places count in their order."""
    numbers = {name: number for number, name in enumerate(addresses)}

    def launch_of(server: Any, role: str) -> Any:
        name = server.server_name(role)
        if name not in numbers:
            return server.launch
        return server.launch.model_copy(update={"prefix": place_prefix(shells, numbers[name]), "host": addresses[name]})

    def placed_model(role: str, model: ModelConfig) -> ModelConfig:
        servers = model.backend.servers()
        if not any(each.server_name(role) in numbers for each in servers):
            return model
        launches = [launch_of(each, role) for each in servers]
        one_each = {"replicas": 1} if hasattr(model.backend, "replicas") else {}
        backend = model.backend.model_copy(update={"launch": launches, **one_each})
        return model.model_copy(update={"backend": backend})

    return {role: placed_model(role, model) for role, model in served.items()}


PAUSE_S = 2.0  # before an agent that has ended is started again


@dataclass(frozen=True)
class PlacedNode:
    """One of the nodes."""

    node_rank: int
    prefix: Sequence[str]  # what leads to its place
    nodes: JoinedNodes  # whom it joins
    logs: Path

    async def keep(self) -> None:
        """Run the agent for ever. Raises `ProcessDiedError` if it ends before the trainer has begun."""
        topology = replace(self.nodes.topology, node_rank=self.node_rank)
        command = agent_command(topology)
        environment = {**SAFE_PATH, SECRET_VARIABLE: topology.secret.value.decode()}
        place = FarPlace(self.prefix, sys.executable)
        name = f"node-{self.node_rank}"
        while True:
            agent = await ChildProcess.start_foreign(
                name, command, log_path=self.logs / f"{name}.log", environment=environment, far=place
            )
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
    nodes: JoinedNodes | None, prefixes: Mapping[int, Sequence[str]], directory: Path
) -> AsyncIterator[None]:
    """Run the nodes that have a place while inside. They end with it; `nodes` should have told them before."""
    made = [
        PlacedNode(node_rank, prefix, nodes, directory / "logs")
        for node_rank, prefix in prefixes.items()
        if nodes is not None
    ]
    async with alongside(*(each.keep for each in made)):
        yield
