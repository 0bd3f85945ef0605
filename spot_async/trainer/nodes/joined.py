"""Node 0's side of a run on several nodes: lets the others in, has them begin and stop, notices when one is lost."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import structlog

from spot_async.base.connection_room import listening_at
from spot_async.base.processes.last_words import WAS_KILLED
from spot_async.base.retry import HEARTBEAT_TIMEOUT_S
from spot_async.base.tasks import alongside
from spot_async.base.text import counted
from spot_async.config import Config
from spot_async.errors import ConfigError, ProcessDiedError, TrainerError
from spot_async.trainer.nodes.authentication import Purpose, Seals
from spot_async.trainer.nodes.connection import Connection, LostConnectionError, reachable_address
from spot_async.trainer.nodes.gate import Gate
from spot_async.trainer.nodes.messages import (
    Begin,
    Ended,
    Ending,
    FromNode,
    Hello,
    Leaving,
    Over,
    Refused,
    Stop,
    Welcome,
    hello_of,
    refusal,
)
from spot_async.trainer.nodes.store_tunnel import bring_to_store, reserve_port
from spot_async.trainer.nodes.topology import Topology
from spot_async.trainer.rank_processes import Meeting

HELLO_TIMEOUT_S = 10.0
NAME_TIMEOUT_S, NAME_EVERY_S = 30.0, 1.0  # of asking for node 0's address
STOP_TIMEOUT_S = 15.0  # a node has some seconds to end its ranks
REASONS_S = 2.0  # where ranks end on all nodes, the cause may be heard this much later than a consequence


@dataclass(frozen=True)
class Fault:
    """Why ranks ended on a node."""

    words: str
    is_loss: bool = False  # of the whole node


def cause(faults: Mapping[int, Fault]) -> Fault:
    """Return which of the faults caused the others, by node in the order in which they were heard. Pure.

    A node that is gone, or a rank that was killed. The others' ranks then only lose their connections.
    """
    return min(faults.values(), key=lambda fault: 0 if fault.is_loss else 1 if WAS_KILLED in fault.words else 2)


class JoinedNodes:
    """The other nodes of a run. Use `open`; meanwhile nodes come and go."""

    def __init__(self, topology: Topology, config: Config, say: Callable[[str], None]) -> None:
        """`say` gets lines for people."""
        self.topology = topology
        self._gate = Gate(topology.secret, say)
        self._hello = hello_of(topology, config)
        self._say = say
        self._members: dict[int, Connection[FromNode]] = {}
        self._at_work: set[int] = set()  # nodes whose ranks were started and have not ended
        self._faults: dict[int, Fault] = {}  # of this round, by node, in the order in which they were heard
        self._refusal: str | None = None  # of the last node that was refused
        self._round = 0
        self._store: socket.socket | None = None  # has the port of this round's store
        self._ending: Ending = "failed"
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Let nodes in for as long as this lasts. In the end tell them so. Raises ConfigError if nobody could come."""
        topology = self.topology
        address = await self._own_address()
        try:
            listener = listening_at(address, topology.port)
        except OSError as error:
            raise ConfigError(
                f"cluster: cannot listen at {self._place}: {_reason(error)}: give cluster.address, one of this "
                "node's, or another cluster.port if a run is there already"
            ) from None
        async with self._gate.open(listener, self._attend):
            others = counted(topology.nodes - 1, "other node")
            self._say(f"node 0 of {topology.nodes} ({topology.source}): {others} may join at {self._place}")
            try:
                yield self
            finally:
                self._release_store()
                for member in self._members.values():
                    member.send(Over(self._ending))

    @property
    def have_begun(self) -> bool:
        """Whether all nodes were there once, and began to train."""
        return self._round > 0

    def ends(self, ending: Ending) -> None:
        """Note how the run ends. Without this it failed."""
        self._ending = ending

    async def begin(self, settings: str) -> None:
        """Wait until all nodes are there, and have them start their ranks.

        Raises `TrainerError` when one does not come in time, and ConfigError when one came that cannot join.
        """
        await self._assemble()
        self._round += 1
        self._refusal = None
        self._faults.clear()
        self._at_work = set(self._members)
        self._release_store()
        self._store = reserve_port()
        for member in self._members.values():
            member.send(Begin(self._round, settings))

    @property
    def meeting(self) -> Meeting:
        """Return how the ranks of node 0 meet the others of this round. Each round has a store of its own."""
        assert self._store is not None
        return Meeting(self.topology, self._store.getsockname()[1])

    def _release_store(self) -> None:
        if self._store is not None:
            self._store.close()

    async def stop(self) -> None:
        """End what is left of this round on the other nodes."""
        for node in self._at_work:
            self._members[node].send(Stop(self._round))
        await self._until(lambda: not self._at_work, STOP_TIMEOUT_S)
        self._at_work.clear()

    async def watch(self, own: Callable[[], Awaitable[None]]) -> None:
        """Run for as long as this round's ranks live, here by `own` and on the other nodes.

        Raises `ProcessDiedError`, which names the node, when they end by themselves. Returns when those here are
        stopped.
        """
        has_ended = False

        async def hear() -> None:
            nonlocal has_ended
            try:
                await own()
            except ProcessDiedError as died:
                self._faults.setdefault(0, Fault(str(died)))
            has_ended = True
            await self._notify()

        async with alongside(hear):
            await self._until(lambda: has_ended or bool(self._faults))
            if self._faults:
                await self._until(lambda: len(self._faults) == self.topology.nodes, REASONS_S)
        if self._faults:
            raise ProcessDiedError(cause(self._faults).words)

    @property
    def _place(self) -> str:
        return f"{self.topology.address}:{self.topology.port}"

    @property
    def _missing(self) -> list[int]:
        return [node for node in range(1, self.topology.nodes) if node not in self._members]

    async def _own_address(self) -> str:
        """Return the address of node 0's name. Clusters may make it known only some seconds after this node started."""
        loop = asyncio.get_running_loop()
        name, end_s = self.topology.address, loop.time() + NAME_TIMEOUT_S
        while True:
            try:
                return await asyncio.to_thread(reachable_address, name)
            except OSError as error:
                if loop.time() >= end_s:
                    raise ConfigError(f"cluster.address={name} is not known here: {error.strerror}") from None
            await asyncio.sleep(NAME_EVERY_S)

    async def _assemble(self) -> None:
        is_first = self._round == 0
        if is_first and self._refusal is not None:
            raise ConfigError(self._refusal)
        if not self._missing:
            return
        self._say(f"waiting for {_nodes(self._missing)}")
        timeout_s = self.topology.join_timeout_s
        if not await self._until(lambda: not self._missing or (is_first and self._refusal is not None), timeout_s):
            came = f"; one came that cannot join: {self._refusal}" if self._refusal else ""
            raise TrainerError(
                f"{_nodes(self._missing)} of {self.topology.nodes} did not come to {self._place} within "
                f"cluster.join_timeout_s={timeout_s:g}{came}"
            )
        if self._missing and self._refusal is not None:
            raise ConfigError(self._refusal)

    async def _attend(self, purpose: Purpose, connected: socket.socket, seals: Seals) -> None:
        """Attend to somebody who knows the secret for as long as they are there."""
        kind: Any = bytes if purpose is Purpose.STORE else FromNode
        connection = await Connection[Any].open(connected, seals, kind)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await connection.receive()
            if isinstance(first, bytes):  # of a rank of another node, which is brought to the store of this round
                if int.from_bytes(first, "big") == self._round and self._store is not None:
                    await bring_to_store(connection, self._store.getsockname()[1])
            elif isinstance(first, Hello) and await self._is_let_in(first, connection):
                await self._listen(first.node_rank, connection)
        except (LostConnectionError, TimeoutError):
            pass  # it was none of ours, did not wait for its place, or is a rank's that has ended
        finally:
            await connection.close()

    async def _is_let_in(self, hello: Hello, connection: Connection[FromNode]) -> bool:
        """Return whether a node may join. Otherwise it is told why."""
        reason = refusal(hello, self._hello)
        is_ours = hello.run_id == self._hello.run_id
        # A node that has just come back need not be missed yet.
        node = hello.node_rank
        if reason is None and not await self._until(lambda: node not in self._members, HEARTBEAT_TIMEOUT_S):
            reason = (
                f"node {node} is there already, at {self._members[node].peer}: give each node a rank of its own, and "
                "each run its own cluster.port"
            )
            is_ours = False  # it is one too many, and ours is there
        if reason is None:
            return True
        structlog.get_logger().warning("node refused", address=connection.peer, reason=reason)
        connection.send(Refused(reason))
        if is_ours:
            self._refusal = reason
            await self._notify()
        return False

    async def _listen(self, node: int, connection: Connection[FromNode]) -> None:
        self._members[node] = connection
        connection.send(Welcome())
        self._say(f"node {node} has joined, from {connection.peer}")
        structlog.get_logger().info("node joined", node=node, address=connection.peer)
        await self._notify()
        named = f"node {node} ({connection.peer})"
        try:
            while True:
                match await connection.receive():
                    case Ended(round=self._round, words=words):
                        await self._end(node, Fault(f"{named}: {words}"))
                    case Leaving(words):
                        raise LostConnectionError(words)
        except LostConnectionError as lost:
            structlog.get_logger().warning("node lost", node=node, address=connection.peer, reason=str(lost))
            del self._members[node]
            await self._end(node, Fault(f"{named} is gone: it {lost}", is_loss=True))

    async def _end(self, node: int, fault: Fault) -> None:
        """Note that a node's ranks have ended, by a fault or because they were told to."""
        if node in self._at_work:
            self._at_work.discard(node)
            self._faults[node] = fault
        await self._notify()

    async def _until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something is so. Return whether it is, which it may not be after the time-out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(is_so)
        return is_so()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _nodes(numbers: Sequence[int]) -> str:
    return ("node " if len(numbers) == 1 else "nodes ") + ", ".join(map(str, numbers))
