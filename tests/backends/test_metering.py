"""What an account is charged when connections fail, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import msgspec
import pytest

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.shared.remote import RemoteServer
from spot_async.errors import TransientError
from spot_async.spending.prices import Size

MODEL = Path(__file__).parents[2] / "examples" / "running_sum" / "teacher"
SIZE = Size(prompt_tokens=10, max_completion_tokens=5)


async def ask(port, tmp_path, *, times=1, **settings):
    """The account after that many requests, and what each raised."""
    settings = OpenAIBackend.Settings(url=f"http://127.0.0.1:{port}", **settings)
    server = RemoteServer(settings, role="teacher", model=str(MODEL), run_directory=tmp_path)
    raised = []
    async with server:
        for _ in range(times):
            deadline = asyncio.get_running_loop().time() + 5
            try:
                await server.ask("/v1/completions", {}, msgspec.json.decode, deadline=deadline, size=SIZE)
            except TransientError as error:
                raised.append(error)
    return server.account, raised


class Closing:
    """Answers the first request of a connection and reads the second, then closes without a word."""

    def __init__(self):
        self.seen = 0

    async def serve(self, reader, writer):
        for answers in (True, False):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.seen += 1
            if answers:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")
                await writer.drain()
        writer.close()


@pytest.mark.parametrize(("settings", "seen", "lost"), [({"prices": {"prompt": 1.0}}, 2, 1), ({}, 3, 0)])
def test_what_costs_money_is_not_sent_again_unseen(tmp_path, settings, seen, lost):
    async def run():
        closing = Closing()
        with contextlib.closing(await asyncio.start_server(closing.serve, "127.0.0.1", 0)) as listening:
            port = listening.sockets[0].getsockname()[1]
            account, raised = await ask(port, tmp_path, times=2, **settings)
            return closing.seen, account.total, raised

    found, total, raised = asyncio.run(run())
    assert (found, len(raised)) == (seen, lost)
    assert (total.answered, total.unknown) == (2 - lost, lost)  # the server had it: it may have worked for it
    assert total.unknown_tokens == 15 * lost


def test_a_request_for_which_there_was_no_connection_costs_nothing(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        account, raised = asyncio.run(ask(taken.getsockname()[1], tmp_path, prices={"prompt": 1.0}))
    total = account.total
    assert (len(raised), total.requests, total.unknown, total.unknown_money) == (1, 1, 0, 0.0)
    assert total.failed == {"UnreachableError": 1}
