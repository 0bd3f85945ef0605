"""How published weights reach inference servers: through a directory that both can read, or from process to process.

Both ways implement `WeightTransport`; each backend adds what its server needs. Here are the settings, and
`WeightSender`, our end of a process group. That is a child process that reads a snapshot's files and broadcasts the
tensors (`weight_sender.py`), so that neither torch nor a tensor enters the orchestrator. Backends tell their servers to
receive.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import msgspec
import zmq
import zmq.asyncio
from pydantic import Field

from spot_async.base import wire
from spot_async.base.addresses import is_loopback
from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import while_alive
from spot_async.config import Section
from spot_async.errors import DeadlineExceededError, ProcessDiedError, TransientError
from spot_async.models.weight_files import TORCH_TYPES
from spot_async.types import WeightSnapshot

from .snapshots import Layout

CLEAN_UP_TIMEOUT_S = 10.0  # to tell a server of an update that has failed
BUCKET_BYTES = 1 << 30  # broadcast in one request; the server needs this much memory beside its weights


class WeightSettings(Section):
    """How new weights reach the servers of a student."""

    transport: Literal["disk", "distributed", "adapter"] = Field(
        "disk",
        description="disk: servers read the published directory; distributed: they receive its tensors; adapter: "
        "they read the adapter alone (needs `training.lora`)",
    )
    address: str = Field("127.0.0.1", description="for distributed: this machine's address, as servers reach it")
    port: int | None = Field(
        None, ge=1, le=65535, description="for distributed: the port to listen on; default: a free one"
    )
    device: str = Field("cuda:0", description="for distributed: the sender's; `cpu`: by gloo between CPUs, not NCCL")

    @property
    def backend(self) -> str:
        """What torch calls the way between the processes."""
        return "gloo" if self.device == "cpu" else "nccl"

    @property
    def by_nccl(self) -> bool:
        return self.transport == "distributed" and self.backend == "nccl"


def check_reachable(settings: WeightSettings, hosts: Sequence[str], *, servers: int) -> None:
    """Raise ValueError if a server elsewhere would look for us on its own machine, or several servers at one port.

    This concerns the distributed transport only. `hosts` are those that the servers are asked at.
    """
    if settings.transport != "distributed":
        return
    if settings.port is not None and servers > 1:
        raise ValueError(
            f"weights.port={settings.port}: each of {servers} servers needs another port: remove it, for free ports"
        )
    for host in hosts:
        if is_loopback(settings.address) and not is_loopback(host):
            raise ValueError(
                f"weights.address={settings.address} means the server's own machine to {host}: give this machine's "
                f"address as {host} reaches it, or weights.transport=disk"
            )


class WeightTransport(Protocol):
    """Sends a paused server new weights and their name."""

    mixed: bool = False  # an update ended half-way: the server has parts of the old and of the new weights

    async def prepare(self, *, deadline: float) -> None:
        """Do whatever can fail before any weights are touched: by default nothing."""
        return None

    async def send(self, snapshot: WeightSnapshot, layout: Layout, *, deadline: float) -> None:
        """Send the snapshot, whose tensors are those of `layout`; return once the server holds it under its version."""

    async def close(self) -> None:
        """Release what is kept between updates: by default nothing."""
        return None


class Tensor(NamedTuple):
    """One tensor of a broadcast, described alike for both ends."""

    name: str
    dtype: str  # torch's name
    shape: tuple[int, ...]


def buckets(layout: Layout, capacity_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield all tensors, in order of names, in groups of at most `capacity_bytes`. A larger tensor is alone."""
    bucket: list[Tensor] = []
    size = 0
    for name, header in sorted(layout.items()):
        if bucket and size + header.size_bytes > capacity_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(Tensor(name, TORCH_TYPES[header.dtype], header.shape))
        size += header.size_bytes
    if bucket:
        yield bucket


# The messages over the socket: each command gets one answer.
class Join(msgspec.Struct, frozen=True, tag="join"):
    group: str
    world_size: int


class Mint(msgspec.Struct, frozen=True, tag="mint"):
    pass


class JoinNccl(msgspec.Struct, frozen=True, tag="join_nccl"):
    unique_id: bytes
    world_size: int


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    directory: str
    names: list[str]


class Answer(msgspec.Struct, frozen=True):
    """The port at the start, an NCCL id for `Mint`, nothing else; or why it failed."""

    value: int | bytes | None = None
    error: str | None = None


Command: TypeAlias = Join | Mint | JoinNccl | Broadcast


def endpoint(channel_directory: str) -> str:
    """Return the socket's address, inside the private directory that both ends know."""
    return f"ipc://{channel_directory}/sender.sock"


class WeightSender:
    """The handle of a sending process. It raises only `TransientError`; after one, stop it. It can be started again."""

    def __init__(self, settings: WeightSettings, *, name: str, log_directory: Path) -> None:
        self._settings = settings
        self._name = f"{name}-weights"
        self._log_path = log_directory / f"{self._name}.log"
        self._resources = AsyncExitStack()
        self._socket: zmq.asyncio.Socket
        self._child: ChildProcess

    async def start(self, *, deadline: float) -> int:
        """Start the process; return its store's port. Only then tell a server to join, since it waits without limit."""
        async with AsyncExitStack() as stack:
            directory = str(stack.enter_context(private_directory("spot-sender-")))
            context = stack.enter_context(zmq.asyncio.Context())
            self._socket = stack.enter_context(context.socket(zmq.PAIR))
            self._socket.linger = 0
            self._socket.bind(endpoint(directory))
            settings = self._settings
            self._child = await ChildProcess.start(
                self._name,
                [
                    *(sys.executable, "-m", "spot_async.backends.shared.weight_sender", directory),
                    *(settings.backend, settings.device, settings.address, str(settings.port or 0)),
                ],
                log_path=self._log_path,
            )
            stack.push_async_callback(self._child.stop, 0.0)
            ready = await self._while_it_lives(self._receive(), "start", deadline)
            self._resources = stack.pop_all()
        return cast(int, ready.value)

    async def stop(self) -> None:
        """End the process, whatever it is doing. Idempotent."""
        await self._resources.aclose()

    async def join(self, group: str, *, world_size: int, deadline: float) -> None:
        """Become rank 0; return when all others have joined too."""
        await self._while_it_lives(self._ask(Join(group, world_size)), "join the group", deadline)

    async def mint(self, *, deadline: float) -> bytes:
        """Return a new NCCL id, by which other ranks find rank 0, which is this process."""
        minted = await self._while_it_lives(self._ask(Mint()), "make an NCCL id", deadline)
        return cast(bytes, minted.value)

    async def join_nccl(self, unique_id: bytes, *, world_size: int, deadline: float) -> None:
        """Join ranks that meet only by NCCL's id, as vLLM's do. Both sides must join at the same time."""
        await self._while_it_lives(self._ask(JoinNccl(unique_id, world_size)), "join the group", deadline)

    async def broadcast(self, directory: str, tensors: Sequence[Tensor], *, deadline: float) -> None:
        """Send tensors of a snapshot in this order; return when they have been received."""
        command = Broadcast(directory, [tensor.name for tensor in tensors])
        await self._while_it_lives(self._ask(command), f"send {len(tensors)} tensors", deadline)

    async def _ask(self, command: Command) -> Answer:
        await self._socket.send(wire.encode(command))
        return await self._receive()

    async def _receive(self) -> Answer:
        return wire.decode(await self._socket.recv(), Answer)

    async def _while_it_lives(self, conversation: Coroutine[Any, Any, Answer], what: str, deadline: float) -> Answer:
        try:
            async with asyncio.timeout_at(deadline):
                answer = await while_alive(conversation, self._child.watch)
        except TimeoutError:
            raise DeadlineExceededError(f"{self._name}: did not {what} before the deadline") from None
        except ProcessDiedError as died:
            raise TransientError(str(died)) from None
        except (msgspec.DecodeError, zmq.ZMQError) as error:
            raise TransientError(f"{self._name}: cannot {what}: {error}") from error
        if answer.error is not None:
            raise TransientError(f"{self._name}: cannot {what}: {answer.error}")
        return answer
