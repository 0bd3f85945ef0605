"""Serves fixed replies from files: `DIRECTORY/v1/x` is the reply to every request for `/v1/x`.

    python benchmarks/fixed_replies.py DIRECTORY

It prints its port. It is for measuring what reading large replies costs.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path


class Connection(asyncio.Protocol):
    def __init__(self, directory: Path) -> None:
        self._read = functools.cache(lambda path: (directory / path.lstrip("/")).read_bytes())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = int(head[head.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
            if len(self._received) < end + 4 + length:
                return
            path = self._received.split(b" ", 2)[1].decode()
            self._received = self._received[end + 4 + length :]
            reply = self._read(path)
            header = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(reply)}\r\n\r\n"
            self._transport.writelines([header.encode(), reply])  # type: ignore[attr-defined]


async def main(directory: Path) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(directory), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
