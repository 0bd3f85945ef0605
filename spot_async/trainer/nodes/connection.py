"""A connection between node 0 and another: whole sealed messages, and a loss that is noticed though nothing is said.

The kernel asks a silent peer whether it is there. So a machine without power or network is noticed after the time-out,
and neither end has to send anything.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

import msgspec

from spot_async.base import wire
from spot_async.base.retry import HEARTBEAT_TIMEOUT_S
from spot_async.errors import ConfigError, SpotError
from spot_async.trainer.nodes.authentication import TAG_BYTES, ForgedError, Seals

T = TypeVar("T")

LENGTH_BYTES = 4
LONGEST_BYTES = 1 << 22  # of a message: a configuration with all its problem sets takes some kilobytes
PROBES = 4  # unanswered ones, after which the peer is lost
CLOSE_TIMEOUT_S = 5.0


class LostConnectionError(SpotError):
    """The other end is gone, or says what is no message."""


class Connection(Generic[T]):
    """One end. It reads messages of type `T`, and sends any."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals, kind: Any) -> None:
        """Use `open`."""
        self._reader = reader
        self._writer = writer
        self._seals = seals
        self._kind = kind
        self.peer = str((writer.get_extra_info("peername") or ["unknown"])[0])

    @classmethod
    async def open(cls, connected: socket.socket, seals: Seals, kind: Any) -> Self:
        """Take over a connection whose ends have shown each other the secret. `kind` is T."""
        connection = cls(*await asyncio.open_connection(sock=connected), seals, kind)
        with suppress(OSError):  # it is closed already, as `receive` will say
            _notice_silence(connected)
        return connection

    def send(self, message: object) -> None:
        """Send a message soon. A loss is noticed by `receive`."""
        frame = wire.encode(message)
        self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame + self._seals.sending.tag(frame))

    async def drain(self) -> None:
        """Wait until what was sent is mostly on its way. Raises `LostConnectionError`."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise LostConnectionError(f"lost the connection: {error.strerror}") from None

    async def receive(self) -> T:
        """Wait for the next message. Raises `LostConnectionError`."""
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if size > LONGEST_BYTES:
                raise LostConnectionError(f"said what is no message of spot-async ({size} bytes)")
            frame = await self._reader.readexactly(size)
            self._seals.receiving.check(frame, await self._reader.readexactly(TAG_BYTES))
            message: T = wire.decode(frame, self._kind)
            return message
        except asyncio.IncompleteReadError:
            raise LostConnectionError("closed the connection") from None
        except ForgedError:
            raise LostConnectionError("said what was not sealed with the run's secret") from None
        except msgspec.DecodeError:
            raise LostConnectionError("said what is no message of spot-async") from None
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:
                raise LostConnectionError(f"was silent for {HEARTBEAT_TIMEOUT_S:g} s") from None
            raise LostConnectionError(f"lost the connection: {error.strerror}") from None

    async def close(self) -> None:
        """Close, once what was sent is written, or cannot be."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except OSError:
            self._writer.transport.abort()


def _notice_silence(connected: socket.socket) -> None:
    """Have the kernel end a connection whose other end has been silent for so long."""
    interval_s = max(1, round(HEARTBEAT_TIMEOUT_S / (PROBES + 1)))
    settings = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": round(1000 * HEARTBEAT_TIMEOUT_S),  # also for what was sent and not acknowledged
    }
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in settings.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reachable_address(host: str) -> str:
    """Return the IP address of node 0's name. Raises OSError if there is none, and ConfigError for one of loopback."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if address.startswith("127.") or address == "::1":
        means = "" if address == host else f" is {address} here, which"
        raise ConfigError(
            f"cluster.address={host}{means or ','} means each machine itself: give an address of node 0 that the other "
            "nodes reach"
        )
    return address
