"""The one port that other machines reach: lets in who knows the run's secret, counts and drops everybody else.

Somebody without the secret is told nothing, is read no more than an answer's bytes, and stays for seconds. There is
little room for such connections (`Room`), and a node that answers at once gets in between.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import structlog

from spot_async.base.connection_room import Room
from spot_async.base.tasks import alongside
from spot_async.base.text import counted, visible
from spot_async.trainer.nodes.authentication import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    TAG_BYTES,
    ForgedError,
    Purpose,
    Seals,
    Secret,
    admitted,
    answer_of,
    proven,
)

PROOF_TIMEOUT_S = 5.0
SAY_EVERY_S = 60.0
FULL_PAUSE_S = 1.0  # where the system has no room for a connection

Attend = Callable[[Purpose, socket.socket, Seals], Awaitable[None]]


class UnknownSecretError(Exception):
    """Who listens there does not know the secret, or does not take ours."""


class Strangers:
    """Counts connections without the secret, and says when somebody should hear of them. Pure."""

    def __init__(self) -> None:
        self._count = 0
        self._said_count = 0
        self._said_s: float | None = None
        self._last = ""

    def add(self, address: str, now_s: float) -> str | None:
        """Count one. Return a line now and then: at the first, and at most once a minute."""
        self._count += 1
        self._last = address
        if self._said_s is not None and now_s < self._said_s + SAY_EVERY_S:
            return None
        self._said_s = now_s
        return self.rest()

    def rest(self) -> str | None:
        """Return the line if there were more since the last one."""
        if self._count == self._said_count:
            return None
        self._said_count = self._count
        return f"{counted(self._count, 'connection')} without the run's secret, last from {visible(self._last)}"


class Gate:
    """Listens on node 0 for its run."""

    def __init__(self, secret: Secret, say: Callable[[str], None]) -> None:
        """`say` gets lines for people."""
        self._secret = secret
        self._say = say
        self._room: Room[asyncio.Task[None]] = Room()
        self._strangers = Strangers()

    @asynccontextmanager
    async def open(self, listener: socket.socket, attend: Attend) -> AsyncIterator[None]:
        """Let others in while inside. `attend` gets each connection, and closes it."""
        with listener:
            try:
                async with alongside(lambda: self._listen(listener, attend)):
                    yield
            finally:
                if (line := self._strangers.rest()) is not None:
                    self._tell(line)

    async def _listen(self, listener: socket.socket, attend: Attend) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connected, (peer, *_) = await loop.sock_accept(listener)
                except OSError as error:
                    structlog.get_logger().warning("connections wait", reason=str(error))
                    await asyncio.sleep(FULL_PAUSE_S)
                    continue
                task = group.create_task(self._meet(connected, peer, attend), name=f"connection from {peer}")
                if (dropped := self._room.enter(task, peer)) is not None:
                    dropped.cancel()
                await asyncio.sleep(0)  # `sock_accept` does not give way while many wait

    async def _meet(self, connected: socket.socket, peer: str, attend: Attend) -> None:
        task = asyncio.current_task()
        assert task is not None
        seals = None
        try:
            connected.setblocking(False)
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                purpose, seals = await self._check(connected)
        except (OSError, EOFError, ForgedError):  # a time-out is an OSError
            pass
        finally:
            self._room.leave(task)
            if seals is None:
                connected.close()
                if line := self._strangers.add(peer, asyncio.get_running_loop().time()):
                    self._tell(line)
        if seals is not None:
            await attend(purpose, connected, seals)

    async def _check(self, connected: socket.socket) -> tuple[Purpose, Seals]:
        loop = asyncio.get_running_loop()
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        await loop.sock_sendall(connected, challenge)
        purpose, proof, seals = admitted(self._secret, challenge, await _exactly(connected, ANSWER_BYTES))
        await loop.sock_sendall(connected, proof)
        return purpose, seals

    def _tell(self, line: str) -> None:
        structlog.get_logger().warning("connections without the secret", words=line)
        self._say(line)


async def knock(address: str, port: int, secret: Secret, purpose: Purpose) -> tuple[socket.socket, Seals]:
    """Connect to node 0, and return the connection once both ends have shown the secret.

    Raises OSError if nobody listens there, and `UnknownSecretError`.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        await loop.sock_connect(connected, (address, port))
        with suppress(EOFError, ForgedError, ConnectionResetError, BrokenPipeError):
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                challenge = await _exactly(connected, CHALLENGE_BYTES)
                said = (bytes([purpose]), challenge, secrets.token_bytes(CHALLENGE_BYTES))
                await loop.sock_sendall(connected, answer_of(secret, said))
                seals = proven(secret, said, await _exactly(connected, TAG_BYTES))
            return connected, seals
        raise UnknownSecretError
    except BaseException:
        connected.close()
        raise


async def _exactly(connected: socket.socket, size: int) -> bytes:
    """Read so many bytes, and none after them. Raises EOFError if there are fewer."""
    loop, read = asyncio.get_running_loop(), b""
    while len(read) < size:
        if not (more := await loop.sock_recv(connected, size - len(read))):
            raise EOFError
        read += more
    return read
