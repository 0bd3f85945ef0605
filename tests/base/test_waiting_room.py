"""Who is next in a waiting room, and what becomes of a grant whose asker was cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.base.waiting_room import WaitingRoom
from spot_async.testing.virtual_time import run_on_virtual_time


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_the_room_serves_by_priority_then_arrival_and_forgets_who_left(entries):
    free, served = [], []
    room = WaitingRoom(lambda asker: free.pop() if free else None, free.append, capacity=len(entries))

    async def ask(priority, number):
        await room.enter(SimpleNamespace(priority=(priority,)))
        served.append((priority, number))

    async def scenario():
        tasks = [asyncio.create_task(ask(priority, number)) for number, (priority, _) in enumerate(entries)]
        await asyncio.sleep(0)
        for task, (_, leaves) in zip(tasks, entries, strict=True):
            if leaves:
                task.cancel()
        await asyncio.sleep(0)
        expected = sorted((p, n) for n, (p, leaves) in enumerate(entries) if not leaves)
        assert len(room) == len(expected)
        for _ in expected:
            free.append("it")
            room.admit()
            await asyncio.sleep(0)
        assert served == expected
        room.admit()
        assert (len(room), free) == (0, [])

    run_on_virtual_time(scenario())


def test_a_full_room_is_reported_as_the_bug_it_is():
    room = WaitingRoom(lambda asker: None, lambda granted: None, capacity=1)

    async def scenario():
        first = asyncio.create_task(room.enter(SimpleNamespace(priority=(0,))))
        await asyncio.sleep(0)
        with pytest.raises(OverflowError):
            await room.enter(SimpleNamespace(priority=(0,)))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run_on_virtual_time(scenario())


def test_a_grant_whose_asker_was_cancelled_goes_to_the_next():
    free, served = ["it"], []

    def give_back(granted):
        free.append(granted)
        room.admit()

    room = WaitingRoom(lambda asker: free.pop() if free else None, give_back)

    async def ask(number):
        served.append((number, await room.enter(SimpleNamespace(priority=(number,)))))

    async def scenario():
        first, second, third = [asyncio.create_task(ask(number)) for number in range(3)]
        await first
        give_back("it")  # second has its turn, and is cancelled before it runs
        second.cancel()
        await third
        await asyncio.gather(second, return_exceptions=True)
        assert len(room) == 0

    run_on_virtual_time(scenario())
    assert served == [(0, "it"), (2, "it")]
