"""The messages between node 0, where the run is, and a node that joins it. Over TCP, as msgpack; nothing is pickled.

    node k -> node 0   Hello      who it is, and what its command would do
    node 0 -> node k   Welcome    it has joined
    node 0 -> node k   Refused    why it cannot join
    node 0 -> node k   Begin      start this node's ranks
    node k -> node 0   Ended      its ranks have ended
    node 0 -> node k   Stop       end the ranks; the next Begin may come
    node k -> node 0   Leaving    somebody stops this node
    node 0 -> node k   Over       the run has ended

`round` counts the trainers of a run: after one is lost, all nodes begin again.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Literal, TypeAlias

import msgspec

from spot_async.config import Config, leaves
from spot_async.trainer.nodes.topology import Topology

VERSIONED = ("spot-async", "torch", "transformers")

Ending = Literal["done", "stopped", "failed"]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    run_id: str
    nodes: int
    node_rank: int
    versions: dict[str, str]
    # The configuration's keys and values; None where whoever started the agent gave it none.
    keys: dict[str, str] | None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    round: int
    settings: str  # `TrainerSettings` as JSON


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    round: int
    words: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    round: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    words: str


class Over(msgspec.Struct, frozen=True, tag="over"):
    ending: Ending


FromNode: TypeAlias = Hello | Ended | Leaving
ToNode: TypeAlias = Welcome | Refused | Begin | Stop | Over


def hello_of(topology: Topology, config: Config | None) -> Hello:
    """Return how a node introduces itself. What nodes may differ in, `cluster`, is left out."""
    keys = None
    if config is not None:
        tree = config.model_dump(mode="json", exclude={"cluster"})
        keys = {key: msgspec.json.encode(value).decode() for key, value in leaves(tree)}
    versions = {name: version(name) for name in VERSIONED} | {"Python": ".".join(platform.python_version_tuple()[:2])}
    return Hello(topology.run_id, topology.nodes, topology.node_rank, versions, keys)


def refusal(hello: Hello, own: Hello) -> str | None:
    """Return why a node cannot join the run of node 0, whose own words are `own`; None if it can. Pure."""
    if hello.run_id != own.run_id:
        return f"this is run {own.run_id!r}, and node {hello.node_rank} is of run {hello.run_id!r}"
    if hello.nodes != own.nodes:
        return f"node {hello.node_rank} counts {hello.nodes} nodes, node 0 counts {own.nodes}: start them alike"
    if not 0 < hello.node_rank < own.nodes:
        return f"node {hello.node_rank} is there already: give each of the {own.nodes} nodes a rank of its own"
    difference = _difference(hello.versions, own.versions)
    if difference is not None:
        name, theirs, ours = difference
        return f"node {hello.node_rank} has {name} {theirs}, node 0 has {ours}: install the same on both"
    if hello.keys is not None and own.keys is not None:
        difference = _difference(hello.keys, own.keys)
        if difference is not None:
            name, theirs, ours = difference
            return (
                f"node {hello.node_rank} has {name}={theirs}, node 0 has {ours}: give all nodes the same configuration"
            )
    return None


def _difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first name whose values differ, with both."""
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            return name, theirs.get(name, "nothing"), ours.get(name, "nothing")
    return None
