"""Who is next in a waiting room, and what becomes of a grant whose asker was cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.base.waiting_room import TicketQueue, WaitingRoom
from spot_async.testing.virtual_time import run_on_virtual_time


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_the_queue_serves_by_priority_then_arrival_and_forgets_who_left(entries):
    queue = TicketQueue(capacity=100)
    tickets = [queue.add((priority,)) for priority, _ in entries]
    for ticket, (_, leaves) in zip(tickets, entries, strict=True):
        if leaves:
            queue.discard(ticket)
    expected = sorted(((p, t) for t, (p, leaves) in zip(tickets, entries, strict=True) if not leaves))
    assert len(queue) == len(expected)
    assert [queue.pop() for _ in expected] == [ticket for _, ticket in expected]
    assert queue.pop() is None


def test_a_full_queue_is_reported_as_the_bug_it_is():
    queue = TicketQueue(capacity=1)
    queue.add((0,))
    with pytest.raises(OverflowError):
        queue.add((0,))


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
