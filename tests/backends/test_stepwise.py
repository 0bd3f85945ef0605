"""Reading large replies lets everything else continue."""

from __future__ import annotations

import asyncio
import threading

import pytest

from spot_async.backends.shared.bodies import LARGE_REPLY_BYTES, Steps, read_aside, run_at_once, run_in_turn


def counting(name: str, count: int, log: list[str]) -> Steps[str]:
    for number in range(count):
        log.append(f"{name}{number}")
        yield
    return name


async def test_others_have_a_turn_before_every_step_and_computations_come_one_after_the_other() -> None:
    log: list[str] = []
    busy = asyncio.Lock()

    async def other() -> None:
        for _ in range(9):
            log.append("-")
            await asyncio.sleep(0)

    both = [run_in_turn(busy, counting("a", 3, log)), run_in_turn(busy, counting("b", 2, log))]
    results = await asyncio.gather(other(), *both)
    assert results[1:] == ["a", "b"]
    assert [entry for entry in log if entry != "-"] == ["a0", "a1", "a2", "b0", "b1"]
    first, last = log.index("a0"), log.index("b1")
    assert all("-" in log[i - 1 : i + 1] for i in range(first, last + 1))


async def test_a_computation_that_fails_or_is_given_up_holds_up_no_other() -> None:
    def failing() -> Steps[None]:
        yield
        raise ValueError("row 7")

    busy = asyncio.Lock()
    with pytest.raises(ValueError, match="row 7"):
        await run_in_turn(busy, failing())
    given_up = asyncio.create_task(run_in_turn(busy, counting("a", 1000, [])))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await run_in_turn(busy, counting("b", 2, [])) == "b"
    assert run_at_once(counting("c", 2, [])) == "c"


async def test_while_a_large_reply_is_read_the_loop_goes_on() -> None:
    went_on = threading.Event()

    def read(reply: bytes) -> int:
        assert went_on.wait(timeout=60.0)  # as numpy, without the interpreter's lock
        return len(reply)

    reading = asyncio.create_task(read_aside(b"x" * (LARGE_REPLY_BYTES + 1), read))
    for _ in range(4):
        await asyncio.sleep(0.001)
    went_on.set()
    assert await reading > LARGE_REPLY_BYTES
