"""Starting one after another on shared devices."""

from __future__ import annotations

import asyncio
import random

import pytest
from ready_order import run_shuffled

from spot_async.base.waiting_room import Turns
from spot_async.testing.virtual_time import run_on_virtual_time

DEVICES = {
    "student-1": frozenset({0}),
    "student-2": frozenset({1}),
    "teacher": frozenset({1, 2}),
    "trainer": frozenset({0, 1}),
    "elsewhere": frozenset(),
}


@pytest.mark.parametrize("seed", range(20))
def test_at_first_all_start_in_the_given_order_and_only_those_that_share_wait(seed):
    rng = random.Random(seed)

    async def scenario():
        turns, starting, began = Turns(DEVICES), set(), []

        async def start(name):
            await asyncio.sleep(rng.random())
            async with turns.turn(name):
                assert all(DEVICES[name].isdisjoint(DEVICES[other]) for other in starting)
                starting.add(name)
                began.append(name)
                await asyncio.sleep(rng.random())
                starting.remove(name)

        async with asyncio.TaskGroup() as group:
            for name in rng.sample([*DEVICES], len(DEVICES)):
                group.create_task(start(name))
        assert began.index("student-1") < began.index("trainer")
        assert began.index("student-2") < began.index("teacher") < began.index("trainer")
        again = asyncio.get_running_loop().time()
        async with turns.turn("trainer"):  # nobody starts, so nobody is waited for
            assert asyncio.get_running_loop().time() == again

    run_shuffled(scenario(), seed)


def test_a_start_that_fails_or_is_cancelled_holds_up_nobody():
    async def scenario():
        turns = Turns(DEVICES)
        with pytest.raises(ValueError, match="no memory"):
            async with turns.turn("student-1"):
                raise ValueError("no memory")
        waiting = asyncio.create_task(turns.turn("trainer").__aenter__())
        await asyncio.sleep(1.0)
        assert not waiting.done()  # student-2 and the teacher come first
        waiting.cancel()
        for name in ("student-2", "teacher", "trainer"):
            async with asyncio.timeout(1.0), turns.turn(name):
                pass

    run_on_virtual_time(scenario())


def test_who_is_started_again_waits_for_whoever_starts_on_the_same_device():
    async def scenario():
        turns, loop = Turns({"a": {0}, "b": {0}}), asyncio.get_running_loop()
        for name in ("a", "b"):
            async with turns.turn(name):
                pass

        async def start(name, after_s):
            await asyncio.sleep(after_s)
            async with turns.turn(name):
                await asyncio.sleep(10.0)
            return loop.time()

        assert await asyncio.gather(start("b", 0.0), start("a", 1.0)) == [10.0, 20.0]

    run_on_virtual_time(scenario())
