"""The port that other machines reach: strangers are told nothing, are bounded and counted, and stop nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spot_async.trainer.nodes.gate as gate_module
from spot_async.base import wire
from spot_async.base.connection_room import STRANGERS, Room, listening_at
from spot_async.trainer.nodes.authentication import CHALLENGE_BYTES, Purpose, Seals, Secret
from spot_async.trainer.nodes.connection import Connection, LostConnectionError
from spot_async.trainer.nodes.gate import Gate, Strangers, UnknownSecretError, knock
from spot_async.trainer.nodes.messages import Hello
from spot_async.trainer.nodes.store_tunnel import bring_to_store, reserve_port, tunnel

SECRET = Secret(b"0123456789abcdef")
HELLO = wire.encode(Hello("spot-async", 2, 1, {}, None))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=80))
def test_a_full_room_drops_the_oldest_of_the_address_that_has_most(moves: list[tuple[bool, int]]) -> None:
    room: Room[int] = Room(size=6)
    inside: dict[int, str] = {}
    for key, (enters, address) in enumerate(moves):
        if not enters:
            room.leave(address)
            inside.pop(address, None)
            continue
        inside[key] = str(address)
        dropped = room.enter(key, str(address))
        assert (dropped is not None) == (len(inside) > 6)
        if dropped is not None:
            counts = {where: [*inside.values()].count(where) for where in inside.values()}
            assert counts[inside[dropped]] == max(counts.values())
            assert dropped == min(each for each, where in inside.items() if where == inside[dropped])
            del inside[dropped]


def test_strangers_are_told_of_at_the_first_then_once_a_minute_and_at_the_end() -> None:
    strangers = Strangers()
    assert strangers.rest() is None
    assert strangers.add("10.0.0.7", 5.0) == "1 connection without the run's secret, last from 10.0.0.7"
    assert [strangers.add("10.0.0.8", 5.0 + second) for second in range(60)] == [None] * 60
    assert strangers.add("fe80::1%\x1b[2J", 65.0) == "62 connections without the run's secret, last from fe80::1%␛[2J"
    assert strangers.rest() is None
    assert strangers.add("10.0.0.9", 66.0) is None
    assert strangers.rest() == "63 connections without the run's secret, last from 10.0.0.9"


class Opened:
    """A gate on loopback that echoes what those send who get in."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.inside = 0
        self.port = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        listener = listening_at("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        async with asyncio.timeout(60), Gate(SECRET, self.said.append).open(listener, self._attend):
            yield

    async def _attend(self, purpose: Purpose, connected: socket.socket, seals: Seals) -> None:
        self.inside += 1
        connection = await Connection[bytes].open(connected, seals, bytes)
        with contextlib.suppress(LostConnectionError):
            connection.send(await connection.receive())
        await connection.close()

    async def visit(self, words: bytes = b"hello", secret: Secret = SECRET) -> bytes:
        found = await knock("127.0.0.1", self.port, secret, Purpose.NODE)
        connection = await Connection[bytes].open(*found, bytes)
        connection.send(words)
        try:
            return await connection.receive()
        finally:
            await connection.close()

    async def strange(self, words: bytes) -> bytes:
        """Return all that a stranger hears after these words."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        heard = b""
        with contextlib.suppress(ConnectionError):
            writer.write(words)
            heard = await reader.read()
        writer.close()
        return heard


class Dropping:
    """Makes a file if somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._path),)


async def test_a_stranger_hears_a_challenge_and_nothing_more_whatever_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "PROOF_TIMEOUT_S", 1.0)
    opened, made = Opened(), tmp_path / "made"
    words = [
        *(b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"\xff" * 65, pickle.dumps(Dropping(made)) + b"\0" * 65),
        *(len(HELLO).to_bytes(4, "big") + HELLO + b"\0" * 65, b"\xff\xff\xff\xff" + b"\1" * 61),
    ]
    async with opened.open():
        for each in words:
            assert len(await opened.strange(each)) in (0, CHALLENGE_BYTES)  # 0: a reset came first
        assert await opened.visit() == b"hello"
    assert not made.exists()
    assert opened.inside == 1
    assert opened.said[0] == "1 connection without the run's secret, last from 127.0.0.1"
    assert opened.said[1:] == ["6 connections without the run's secret, last from 127.0.0.1"]


async def test_another_secret_is_refused_on_both_sides() -> None:
    opened = Opened()
    async with opened.open():
        with pytest.raises(UnknownSecretError):
            await opened.visit(secret=Secret(b"another secret!!"))
        assert await opened.visit() == b"hello"
    assert opened.inside == 1


async def test_a_recorded_conversation_is_refused_by_either_end() -> None:
    """A stranger between both ends records one, and says it again to node 0 and to node k."""
    opened = Opened()
    heard: dict[str, bytearray] = {"node k": bytearray(), "node 0": bytearray()}

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1000):
                record.extend(piece)
                writer.write(piece)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far, out = await asyncio.open_connection("127.0.0.1", opened.port)
        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(reader, out, heard["node k"]))
            group.create_task(pass_on(far, writer, heard["node 0"]))

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(heard["node 0"]))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with opened.open(), await asyncio.start_server(between, "127.0.0.1", 0) as recorder:
        port, opened_port = recorder.sockets[0].getsockname()[1], opened.port
        connected, seals = await knock("127.0.0.1", port, SECRET, Purpose.NODE)
        connection = await Connection[bytes].open(connected, seals, bytes)
        connection.send(b"hello")
        assert await connection.receive() == b"hello"
        await connection.close()
        assert len(await opened.strange(bytes(heard["node k"]))) in (0, CHALLENGE_BYTES)
        assert opened.inside == 1
        async with await asyncio.start_server(repeat, "127.0.0.1", 0) as false_node:
            opened.port = false_node.sockets[0].getsockname()[1]
            with pytest.raises(UnknownSecretError):
                await opened.visit()
            opened.port = opened_port


async def test_thousands_of_silent_strangers_keep_no_node_out_and_few_of_them_stay() -> None:
    opened = Opened()
    async with opened.open():
        strangers = [await asyncio.open_connection("127.0.0.1", opened.port) for _ in range(1000)]
        assert await opened.visit() == b"hello"
        closed = 0
        for reader, _ in strangers[: -STRANGERS - 1]:
            with contextlib.suppress(ConnectionError):
                await reader.read()
            closed += 1
        assert closed == 1000 - STRANGERS - 1
        assert await opened.visit() == b"hello"
        for _, writer in strangers:
            writer.close()
    assert len(opened.said) == 2
    assert opened.said[1] == "1000 connections without the run's secret, last from 127.0.0.1"


async def test_who_says_half_an_answer_is_waited_for_some_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "PROOF_TIMEOUT_S", 0.1)
    opened = Opened()
    async with opened.open():
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
        writer.write(b"half")
        assert len(await reader.read()) == CHALLENGE_BYTES  # and then the end
        writer.close()
    assert opened.said == ["1 connection without the run's secret, last from 127.0.0.1"]


async def test_the_store_on_loopback_is_reached_through_the_tunnel_also_when_it_comes_late() -> None:
    answered = asyncio.Event()

    async def store(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(reversed(await reader.readexactly(100_000))))
        await reader.read()
        writer.close()
        answered.set()

    async def attend(purpose: Purpose, connected: socket.socket, seals: Seals) -> None:
        assert purpose is Purpose.STORE
        await bring_to_store(await Connection[bytes].open(connected, seals, bytes), port)

    async def enter() -> Connection[bytes]:
        connected, seals = await knock(*listener.getsockname(), SECRET, Purpose.STORE)
        return await Connection[bytes].open(connected, seals, bytes)

    listener, reserved = listening_at("127.0.0.1", 0), reserve_port()
    port = reserved.getsockname()[1]
    words = os.urandom(100_000)
    said: list[str] = []
    async with asyncio.timeout(60), Gate(SECRET, said.append).open(listener, attend), tunnel(enter) as local:
        reader, writer = await asyncio.open_connection("127.0.0.1", local)
        writer.write(words)
        await asyncio.sleep(0.2)
        async with await asyncio.start_server(store, "127.0.0.1", port):
            assert await reader.readexactly(100_000) == bytes(reversed(words))
            writer.close()
            await answered.wait()
    reserved.close()
    assert said == []
