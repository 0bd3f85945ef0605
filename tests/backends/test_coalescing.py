"""What a caller sees of coalescing: its own reply, its own error, its own cancellation."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from spot_async.backends.local.coalescing import Asked, Batch, Coalescer
from spot_async.errors import DeadlineExceededError, PermanentError, RequestError, TransientError
from spot_async.serving.api import MAX_TOGETHER, GenerateRequest
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Generation, SamplingSettings

Send = Callable[[Batch[Generation], float], Awaitable[None]]


async def ask(
    coalescer: Coalescer, send: Send, session: str, request: Asked[Generation], deadline: float
) -> Generation:
    """Ask as the backend does."""
    if (found := await coalescer.reply_with_others(session, request, deadline)) is not None:
        return found
    async with coalescer.carry(session, request) as batch:
        await send(batch, deadline)
    return batch.own_reply()


def request(seed: int) -> Asked[Generation]:
    sampling = SamplingSettings(max_tokens=4, stop_token_ids=(), seed=seed)
    sent = GenerateRequest(prompt_ids=np.ones(2, np.int32), sampling=sampling, timeout_s=1.0)
    return Asked(sent, Generation, lambda reply: reply, 0)


def reply(seed: int) -> Generation:
    return Generation(
        token_ids=np.array([seed], np.int32), logprobs=np.zeros(1, np.float32), finish_reason="length", version_spans=()
    )


class Server:
    """Remembers what it was sent, and answers when told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()

    async def send(self, batch: Batch[Generation], deadline: float) -> None:
        seeds = [each.request.sampling.seed for each in batch.asked]
        self.batches.append(seeds)
        await self.open.wait()
        for index, seed in enumerate(seeds):
            batch.settle(index, PermanentError(f"seed {seed}") if seed < 0 else reply(seed))


async def asked(coalescer: Coalescer, send: Send, *seeds: int, session: str = "s") -> list[asyncio.Task[Generation]]:
    tasks = [asyncio.create_task(ask(coalescer, send, session, request(seed), 1e9)) for seed in seeds]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_one_turn_of_one_session_is_one_batch() -> None:
    server = Server()
    coalescer = Coalescer()
    first = await asked(coalescer, server.send, 1, 2, 3)
    second = await asked(coalescer, server.send, 4)
    other = await asked(coalescer, server.send, 5, session="t")
    server.open.set()
    assert [int((await task).token_ids[0]) for task in first + second + other] == [1, 2, 3, 4, 5]
    assert server.batches == [[1, 2, 3], [4], [5]]


async def test_more_than_a_server_takes_at_once_leave_as_several() -> None:
    server = Server()
    seeds = range(2 * MAX_TOGETHER + 1)
    tasks = await asked(Coalescer(), server.send, *seeds)
    server.open.set()
    assert [int((await task).token_ids[0]) for task in tasks] == [*seeds]
    assert [len(batch) for batch in server.batches] == [MAX_TOGETHER, MAX_TOGETHER, 1]


async def test_an_error_is_its_own_request_s() -> None:
    server = Server()
    tasks = await asked(Coalescer(), server.send, 1, -2, 3)
    server.open.set()
    assert int((await tasks[0]).token_ids[0]) == 1
    with pytest.raises(PermanentError, match="seed -2"):
        await tasks[1]
    assert int((await tasks[2]).token_ids[0]) == 3


async def test_when_sending_fails_every_request_fails_with_an_error_of_its_own() -> None:
    async def send(batch: Batch[Generation], deadline: float) -> None:
        batch.settle(0, reply(1))
        raise TransientError("connection reset")

    results = await asyncio.gather(*(await asked(Coalescer(), send, 1, 2, 3)), return_exceptions=True)
    assert isinstance(results[0], Generation)
    assert [str(error) for error in results[1:]] == ["connection reset"] * 2
    assert results[1] is not results[2]


@pytest.mark.parametrize("turns", [0, 3])
async def test_when_the_carrier_is_cancelled_the_others_ask_again(turns: int) -> None:
    server = Server()
    coalescer = Coalescer()
    tasks = [asyncio.create_task(ask(coalescer, server.send, "s", request(seed), 1e9)) for seed in (1, 2, 3)]
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[0].cancel()
    server.open.set()
    assert [int((await task).token_ids[0]) for task in tasks[1:]] == [2, 3]
    assert tasks[0].cancelled()
    assert server.batches[-1] == [2, 3]


def test_a_request_is_not_given_up_for_the_carrier_s_deadline() -> None:
    async def send(batch: Batch[Generation], deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(10.0)
        except TimeoutError:
            raise DeadlineExceededError("late") from None
        for index, each in enumerate(batch.asked):
            batch.settle(index, reply(each.request.sampling.seed))

    async def scenario() -> None:
        coalescer = Coalescer()
        carrier, patient, short = (
            asyncio.create_task(ask(coalescer, send, "s", request(seed), deadline))
            for seed, deadline in ((1, 5.0), (2, 100.0), (3, 5.0))
        )
        for late in (carrier, short):
            with pytest.raises(DeadlineExceededError):
                await late
        assert int((await patient).token_ids[0]) == 2

    run_on_virtual_time(scenario())


async def test_a_cancelled_request_leaves_the_batch_alone() -> None:
    server = Server()
    coalescer = Coalescer()
    tasks = await asked(coalescer, server.send, 1, 2, 3)
    tasks[1].cancel()
    server.open.set()
    assert [int((await tasks[i]).token_ids[0]) for i in (0, 2)] == [1, 3]
    assert len(server.batches) == 1


async def test_requests_that_fail_together_leave_nothing_behind_them() -> None:
    async def send(batch: Batch[Generation], deadline: float) -> None:
        batch.settle(1, PermanentError("seed 2"))
        raise TransientError("connection reset")

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for task in await asked(Coalescer(), send, 1, 2, 3):
            with pytest.raises(RequestError):
                await task
        del task
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, GenerateRequest)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
