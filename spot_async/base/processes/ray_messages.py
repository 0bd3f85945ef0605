"""What the run and its helper for Ray (`ray_helper.py`) say to each other, and what they say to people."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

ANSWER = "placed"  # sockets in the helper's directory
SHELLS = "shells"
_VERSIONS = re.compile(r"Ray: (\S+) Python: (\S+)")
_ALL_NODES_HAVE = ("node:", "memory", "object_store_memory", "accelerator_type:")  # resources that Ray adds by itself

Resources = Mapping[str, float]  # by Ray's names, such as CPU and GPU


class Request(msgspec.Struct):
    """The places to find."""

    address: str  # of the cluster
    servers: dict[str, dict[str, float]]  # what each server takes of a machine, by its name
    timeout_s: float
    nodes: dict[str, dict[str, float]] = {}  # the same of the trainer's nodes, which may move to another machine

    @property
    def asked(self) -> dict[str, dict[str, float]]:
        """Return all of it, in the order of places."""
        return {**self.servers, **self.nodes}


class Placed(msgspec.Struct):
    """The answer: either the address of each place, or why there is none, in one line."""

    addresses: dict[str, str] = {}
    problem: str | None = None


def refused(address: str, reason: str) -> str:
    """Say why Ray did not let us in."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    said = " ".join(lines)
    if "ersion mismatch" in said:
        found = _VERSIONS.findall(said)  # the cluster's come first
        if len(found) != 2:
            return f"cluster.address={address}: install the cluster's versions here: {said}"
        theirs, ours = (f"Ray {ray} and Python {python}" for ray, python in found)
        return f"cluster.address={address}: the cluster has {theirs}, here are {ours}: install the same here"
    return f"cluster.address={address}: no Ray cluster that this machine is a node of: {said or 'no answer'}"


def not_placed(request: Request, state: str, nodes: Mapping[str, Resources], free: Resources) -> str:
    """Say what was asked for in vain, what the nodes have, and what of that is free."""
    asked = "; ".join(f"{name} {shown(resources)}" for name, resources in request.asked.items())
    have = "; ".join(f"{address} {shown(resources)}" for address, resources in sorted(nodes.items()))
    why = "no node has what one of them takes" if state == "INFEASIBLE" else "not enough of it is free"
    return (
        f"cluster: Ray could not place all within cluster.start_timeout_s={request.timeout_s:g}: {why}: "
        f"asked: {asked}: nodes: {have}: free in all: {shown(free)}"
    )


def shown(resources: Resources) -> str:
    """Return resources as the configuration has them."""
    own = {name: value for name, value in sorted(resources.items()) if not name.startswith(_ALL_NODES_HAVE)}
    return "{" + ", ".join(f"{name}: {value:g}" for name, value in own.items()) + "}"
