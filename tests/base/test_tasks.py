"""Leaving several resources at once, each with its own time; threads that are waited for; requests sent again."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest
from ready_order import run_shuffled

from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import entered_in_thread, in_thread, leaves, running, sent_again
from spot_async.errors import ThrottledError, TransientError
from spot_async.testing.virtual_time import run_on_virtual_time

GRACE_S = 5.0


class Resource:
    """Takes `GRACE_S` to leave in order, or fails at once, as when its directory is gone."""

    def __init__(self, error=None):
        self.error = error
        self.end = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        try:
            if self.error is not None:
                raise self.error
            await asyncio.sleep(GRACE_S)
            self.end = "in order"
        except asyncio.CancelledError:
            self.end = "cut short"
            raise


async def enter_and_leave(*resources):
    async with running(*resources):
        pass


@pytest.mark.parametrize("errors", [[OSError("gone")], [OSError("gone"), ValueError("a bug")]])
def test_one_that_cannot_be_left_takes_no_time_from_the_others(errors):
    """Such as from a server that would be killed instead of stopped, and leave shared memory behind."""
    others = [Resource(), Resource()]
    with pytest.raises((OSError, ExceptionGroup)) as raised:
        run_on_virtual_time(enter_and_leave(others[0], *map(Resource, errors), others[1]))
    assert leaves(raised.value) == errors
    assert [each.end for each in others] == ["in order", "in order"]


def test_who_is_stopped_while_leaving_cuts_all_of_it_short():
    resources = [Resource(), Resource(OSError("gone")), Resource()]

    async def scenario():
        task = asyncio.create_task(enter_and_leave(*resources))
        await asyncio.sleep(GRACE_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() == GRACE_S / 2

    run_on_virtual_time(scenario())
    assert [each.end for each in resources] == ["cut short", None, "cut short"]


@pytest.mark.parametrize(("attempts", "asked"), [(1, 4), (3, 6)])
def test_a_request_outside_of_stages_has_a_budget_for_each_class_of_failure(attempts, asked):
    """Being throttled uses up none of what resets may take."""
    throttled, reset = ThrottledError("busy", retry_after_s=2.0), TransientError("reset")
    failures, asked_s = [throttled, throttled, throttled, reset, reset, reset], []

    async def ask():
        asked_s.append(asyncio.get_running_loop().time())
        raise failures[len(asked_s) - 1]

    with pytest.raises(TransientError, match="reset"):
        run_on_virtual_time(sent_again(ask, RetryPolicy(attempts), 100.0, jitter=lambda: 0.0, what="a test"))
    assert len(asked_s) == asked
    assert asked_s[:4] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("retry_after_s", "deadline_s", "expected_s"),
    [(4.0, 10.0, [0.0, 4.0, 8.0]), (366 * 86_400.0, 300.0, [0.0])],
    ids=["soon", "in a year"],
)
def test_a_request_outside_of_stages_is_not_sent_again_past_its_deadline(retry_after_s, deadline_s, expected_s):
    asked_s = []

    async def ask():
        asked_s.append(asyncio.get_running_loop().time())
        raise ThrottledError("busy", retry_after_s=retry_after_s)

    with pytest.raises(ThrottledError, match="busy"):
        run_on_virtual_time(sent_again(ask, RetryPolicy(1), deadline_s, jitter=lambda: 0.0, what="a test"))
    assert asked_s == expected_s


def _order_of_tasks(ready_order: int | None) -> list[int]:
    """Return the order in which tasks that become ready together continue."""

    async def scenario() -> list[int]:
        order, start = list[int](), asyncio.Event()

        async def note(number: int) -> None:
            await start.wait()
            order.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(note(number))
            await asyncio.sleep(1.0)
            start.set()
        return order

    return run_shuffled(scenario(), ready_order)


def test_virtual_time_shuffles_tasks_that_are_ready_together_by_its_seed() -> None:
    plain, first, second = (_order_of_tasks(seed) for seed in (None, 1, 2))
    assert plain == list(range(20))
    assert sorted(first) == sorted(second) == plain
    assert plain != first != second
    assert _order_of_tasks(1) == first


async def test_what_works_in_a_thread_has_ended_when_its_cancellation_has():
    began, may_end, done = threading.Event(), threading.Event(), []

    def work():
        began.set()
        may_end.wait()
        done.append("written")

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["written"]


@pytest.mark.parametrize("moment", ["entering", "inside", "leaving"])
async def test_what_is_entered_in_a_thread_leaves_the_loop_alone_and_is_left_when_it_is_cancelled(moment):
    """It hears what ended the block, as W&B wants to know."""
    loop, steps, reached, may_go_on = asyncio.get_running_loop(), [], asyncio.Event(), threading.Event()

    def step(name):
        steps.append(name)
        if name == moment:
            loop.call_soon_threadsafe(reached.set)  # the loop is alive
            may_go_on.wait()

    @contextmanager
    def blocking():
        step("entering")
        try:
            yield "entered"
        except asyncio.CancelledError:
            steps.append("cancelled")
            raise
        finally:
            step("leaving")

    async def use():
        async with entered_in_thread(blocking()) as entered:
            assert entered == "entered"
            if moment == "inside":
                reached.set()
                await loop.create_future()

    task = asyncio.create_task(use())
    await reached.wait()
    task.cancel()
    loop.call_soon(may_go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["entering", *(["cancelled"] if moment != "leaving" else []), "leaving"]
