"""Measures the peak memory of a client whose server answers with bombs, beside that of a good run.

A process of its own asks for each kind of reply, as for a vLLM teacher's scores, `IN_FLIGHT` at a time. The benchmark
fails if one takes more than `ALLOWED_MIB` above the good one, or if its event loop computes for `ALLOWED_S` longer
without giving others a turn. That is CPU time, so a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from report import show

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.shared.remote import RemoteServer
from spot_async.backends.vllm.client import VllmClient
from spot_async.errors import RequestError

MODEL = Path(__file__).parents[1] / "examples" / "running_sum" / "teacher"
TOKENS, TOP_K, IN_FLIGHT, REQUESTS, DEADLINE_S = 2048, 16, 32, 64, 15.0
MIB = 1 << 20
ALLOWED_MIB, ALLOWED_S = 100, 0.3
HEAD = b"HTTP/1.1 200 X\r\n"
GZIPPED = HEAD + b"Content-Encoding: gzip\r\n"
LARGEST = 4 * MIB + (TOKENS + 1) * 512 + (TOKENS * (TOP_K + 1) + 1) * 256  # about the most that such a reply may take
Parts = Iterator[bytes]


def score() -> bytes:
    """Return a score as vLLM writes it, of tokens that are all 5."""
    row = {str(5 + k): {"logprob": -1.2345678901234567 - k, "rank": k + 1, "decoded_token": " some"}
           for k in range(TOP_K + 1)}  # fmt: skip
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length"}
    return json.dumps({"choices": [choice], "prompt_logprobs": [None] + [row] * (TOKENS - 1)}).encode()


@functools.cache
def packed(start: bytes, filling: bytes, size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    step = filling * (MIB // len(filling))
    return packer.compress(start) + b"".join(packer.compress(step) for _ in range(size // MIB)) + packer.flush()


def whole(head: bytes, body: bytes) -> Parts:
    yield head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def forever(head: bytes, part: bytes) -> Parts:
    yield head
    while True:
        yield part


KINDS: dict[str, Callable[[], Parts]] = {
    "good": lambda: whole(HEAD, score()),
    "gzip of 1 GiB": lambda: whole(GZIPPED, packed(b"", b"\0", 1024 * MIB)),
    "refusal, gzip of 1 GiB": lambda: whole(GZIPPED.replace(b"200", b"400"), packed(b"", b"\0", 1024 * MIB)),
    "without end": lambda: forever(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + bytes(65536) + b"\r\n"),
    "refusal without end": lambda: forever(HEAD.replace(b"200", b"400") + b"\r\n", bytes(65536)),
    "chunks of a byte": lambda: forever(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n" * 4096),
    "blanks, just allowed": lambda: whole(GZIPPED, packed(score(), b" ", LARGEST - len(score()) - MIB)),
    "100 Continue for ever": lambda: forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "an answer, then 100 Continue": lambda: forever(
        HEAD + b"Content-Length: 2\r\n\r\n{}", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000
    ),
    "Content-Length of 5,000 digits": lambda: iter([HEAD + b"Content-Length: " + b"1" * 5000 + b"\r\n\r\n{}"]),
}


async def serve(kind: str, port: Connection) -> None:
    parts = [*KINDS[kind]()] if not kind.endswith(("for ever", "without end", "byte", "then 100 Continue")) else None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                for part in parts or KINDS[kind]():
                    writer.write(part)
                    await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def run_server(kind: str, port: Connection) -> None:
    asyncio.run(serve(kind, port))


def run_client(port: int, found: Connection) -> None:
    found.send(asyncio.run(ask(port)))


async def ask(port: int) -> tuple[int, float, dict[str, int]]:
    """Return peak resident MiB, the longest time that the loop stood still, and how the requests ended."""
    ends: Counter[str] = Counter()
    prompt, response = [5] * (TOKENS // 4), [5] * (TOKENS - TOKENS // 4)
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as directory:
        settings = OpenAIBackend.Settings(url=f"http://127.0.0.1:{port}")
        async with RemoteServer(settings, role="teacher", model=str(MODEL), run_directory=Path(directory)) as server:
            client = VllmClient(server)
            waiting = iter(range(REQUESTS))

            async def work() -> None:
                for _ in waiting:
                    try:
                        await client.score(prompt, response, top_k=TOP_K, deadline=loop.time() + DEADLINE_S)
                        ends["answered"] += 1
                    except RequestError as error:
                        ends[type(error).__name__] += 1

            async with stillness() as longest, asyncio.TaskGroup() as group:
                for _ in range(IN_FLIGHT):
                    group.create_task(work())
    return peak_mib(), longest[0], dict(ends)


def peak_mib() -> int:
    """Return the peak resident MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


@contextlib.asynccontextmanager
async def stillness() -> AsyncIterator[list[float]]:
    """Measure the longest time, in CPU seconds, in which the loop gave others no turn."""
    longest = [0.0]

    async def watch() -> None:
        while True:
            before_s = time.process_time()
            await asyncio.sleep(0)
            longest[0] = max(longest[0], time.process_time() - before_s)

    watching = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        watching.cancel()


def measure(kind: str) -> tuple[int, float, dict[str, int]]:
    context = multiprocessing.get_context("spawn")
    (here, there), (peak, told) = context.Pipe(), context.Pipe()
    server = context.Process(target=run_server, args=(kind, there), daemon=True)
    server.start()
    client = context.Process(target=run_client, args=(here.recv(), told), daemon=True)
    client.start()
    try:
        found: tuple[int, float, dict[str, int]] = peak.recv()
        return found
    finally:
        for process in (client, server):
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    chosen = parser.parse_args().kinds or [*KINDS]
    found = {kind: measure(kind) for kind in dict.fromkeys(["good", *chosen])}
    good_mib, good_s, _ = found["good"]
    rows = [
        [kind, f"{mib}", f"{mib - good_mib:+}", f"{still_s:.2f}", ", ".join(f"{n} {end}" for end, n in ends.items())]
        for kind, (mib, still_s, ends) in found.items()
    ]
    columns = ("reply", "peak MiB", "over good", "loop held, CPU s", "requests")
    show(f"scores of {TOKENS} tokens, top-{TOP_K}, {IN_FLIGHT} in flight", columns, rows)
    if any(mib > good_mib + ALLOWED_MIB or still_s > good_s + ALLOWED_S for mib, still_s, _ in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
