"""Network namespaces of a test's own, which are gone after it. They need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest


@contextlib.contextmanager
def namespace(word: str) -> Iterator[str]:
    """Make a namespace; yield its name. Skips where none can be made."""
    name = f"spot-{word}-{os.getpid()}"
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run("ip", "netns", "del", name)


@contextlib.contextmanager
def linked(name: str) -> Iterator[tuple[str, str]]:
    """Link a namespace with this one; yield our end's device, and the other end's address."""
    ours, theirs = f"spot{os.getpid()}a", f"spot{os.getpid()}b"
    network = f"10.219.{os.getpid() % 250}"
    run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
    try:
        run("ip", "addr", "add", f"{network}.1/30", "dev", ours)
        run("ip", "link", "set", ours, "up")
        run("ip", "-n", name, "addr", "add", f"{network}.2/30", "dev", theirs)
        run("ip", "-n", name, "link", "set", theirs, "up")
        yield ours, f"{network}.2"
    finally:
        run("ip", "link", "del", ours)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True)
class Machine:
    """A namespace with an address of its own, and a link that can be cut."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def set_link(self, state: Literal["up", "down"]) -> None:
        run("ip", "-n", self.name, "link", "set", "eth0", state)


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Make machines on a network of their own; yield them."""
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(namespace("hub"))
        run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "hub", "up")
        found = []
        for number in range(count):
            made = Machine(stack.enter_context(namespace(f"m{number}")), f"10.88.0.{number + 1}")
            port = f"port{number}"
            run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", made.name)
            run("ip", "-n", hub, "link", "set", port, "master", "hub", "up")
            run("ip", "-n", made.name, "addr", "add", f"{made.address}/24", "dev", "eth0")
            made.set_link("up")
            found.append(made)
        yield found
