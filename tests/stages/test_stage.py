"""The stage and the pure parts around it, under orders a scheduler could produce."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.base.retry import RetryPolicy
from spot_async.errors import DeadlineExceededError, PermanentError, ThrottledError, TransientError
from spot_async.replicas.leasing import OneService
from spot_async.stages.stage import Stage, StageLimits
from spot_async.testing.virtual_time import DeadlockError, run_on_virtual_time


def stage(concurrency=2, timeout_s=10.0, attempts=3, capacity=1000, **more):
    return Stage(
        "probe",
        OneService(None),
        StageLimits(
            concurrency=concurrency,
            timeout_s=timeout_s,
            retry=RetryPolicy(attempts),
            waiting_capacity=capacity,
            **more,
        ),
        jitter=lambda: 0.0,
    )


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_slots_survive_any_mix_of_cancellation_failure_and_success(seed):
    rng = random.Random(seed)
    probe = stage(concurrency=rng.randint(1, 4), timeout_s=5.0)
    peak = running = 0

    async def request(_, deadline):
        nonlocal peak, running
        running += 1
        peak = max(peak, running)
        try:
            await asyncio.sleep(rng.choice([0.0, 0.1, 1.0, 20.0]))
            if rng.random() < 0.3:
                raise rng.choice([PermanentError("no"), TransientError("again")])
        finally:
            running -= 1

    async def scenario():
        tasks = [asyncio.create_task(probe.ask((i,), request)) for i in range(20)]
        for task in rng.sample(tasks, 8):
            await asyncio.sleep(rng.choice([0.0, 0.05, 0.5]))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert running == 0
        assert probe.in_flight == 0
        assert probe.waiting == 0
        assert peak <= probe.concurrency

        async def second(_, deadline):
            await asyncio.sleep(1.0)

        started = asyncio.get_running_loop().time()
        rounds = [asyncio.create_task(probe.ask((i,), second)) for i in range(2 * probe.concurrency)]
        await asyncio.sleep(0.5)
        assert (probe.in_flight, probe.waiting) == (probe.concurrency, probe.concurrency)
        await asyncio.gather(*rounds)
        assert asyncio.get_running_loop().time() - started == pytest.approx(2.0)

    run_on_virtual_time(scenario())


def test_the_deadline_covers_all_attempts_and_backoff_but_not_the_turn():
    async def scenario():
        probe = stage(concurrency=1, timeout_s=3.0, attempts=100)
        loop = asyncio.get_running_loop()

        async def fail(_, deadline):
            assert deadline == 3.0
            raise TransientError("connection refused")

        with pytest.raises(TransientError, match="connection refused"):
            await probe.ask((0,), fail)
        assert loop.time() <= 3.0

        async def hang(_, deadline):
            await asyncio.Event().wait()

        started = loop.time()
        with pytest.raises(DeadlineExceededError, match="probe: no answer within 3 s"):
            await probe.ask((0,), hang)
        assert loop.time() - started == pytest.approx(3.0)

        async def take_two_seconds(_, deadline):
            await asyncio.sleep(2.0)

        async with asyncio.TaskGroup() as group:
            for i in range(5):  # the last one waits eight seconds for its turn
                group.create_task(probe.ask((i,), take_two_seconds))

    run_on_virtual_time(scenario())


def asked(probe, answers):
    """Ask once, by attempts that take so many seconds each. Return when each was sent, its deadline, and the end."""

    async def scenario():
        sent_s, left = [], iter(answers)

        async def request(_, deadline):
            sent_s.append((loop.time(), deadline))
            await asyncio.sleep(next(left))

        loop = asyncio.get_running_loop()
        with contextlib.suppress(DeadlineExceededError):
            await probe.ask((0,), request)
        return sent_s, loop.time()

    return run_on_virtual_time(scenario())


HANGS = 1e6


@pytest.mark.parametrize(
    ("more", "answers", "sent_s", "ended_s"),
    [
        ({}, [HANGS, 1.0], [(0.0, 10.0)], 10.0),  # no limit of its own: one attempt, as long as all together
        ({"attempt_timeout_s": 2.0}, [HANGS, HANGS, 1.0], [(0.0, 2.0), (2.125, 4.125), (4.375, 6.375)], 5.375),
        ({"attempt_timeout_s": 6.0}, [HANGS, HANGS], [(0.0, 6.0), (6.125, 10.0)], 10.0),  # the second gets what is left
        ({"attempt_timeout_s": 2.0, "attempts": 1}, [HANGS], [(0.0, 2.0)], 2.0),
        ({"attempt_timeout_s": 2.0, "attempts": 2}, [HANGS, HANGS], [(0.0, 2.0), (2.125, 4.125)], 4.125),
    ],
)
def test_a_reply_that_is_lost_is_asked_for_again_while_there_is_time(more, answers, sent_s, ended_s):
    assert asked(stage(**more), answers) == (sent_s, ended_s)


def test_the_deadline_of_an_attempt_is_put_off_while_its_server_stands_still_for_new_weights():
    async def scenario():
        probe, loop = stage(attempt_timeout_s=2.0), asyncio.get_running_loop()

        async def request(_, deadline):
            await asyncio.sleep(5.9)

        asking = asyncio.create_task(probe.ask((0,), request))
        await asyncio.sleep(1.0)
        (pending,) = probe.open
        pending.clock_stopped(loop.time())
        await asyncio.sleep(4.0)
        pending.clock_started(loop.time())
        await asking
        return loop.time(), pending.attempts

    assert run_on_virtual_time(scenario()) == (5.9, 1)


def test_only_what_can_succeed_later_is_sent_again():
    policy = RetryPolicy(attempts=3)
    assert policy.delay_s(PermanentError("400"), 1, 0.0) is None
    assert policy.delay_s(TransientError("reset"), 3, 0.0) is None
    assert 0 < policy.delay_s(TransientError("reset"), 1, 0.0) < policy.delay_s(TransientError("reset"), 2, 0.0)
    assert policy.delay_s(ThrottledError("429", retry_after_s=30.0), 1, 0.0) == 30.0
    assert policy.delay_s(ThrottledError("429"), 5000, 0.0) == 4.0  # however often: the deadline ends it
    assert policy.delay_s(DeadlineExceededError("late"), 1, 0.0) is None
    assert policy.delay_s(DeadlineExceededError("late"), 1, 0.0, has_time=True) == 0.125


def test_throttling_ends_at_the_deadline_and_uses_up_no_attempts():
    async def scenario():
        probe = stage(timeout_s=600.0, attempts=2)
        loop = asyncio.get_running_loop()
        sent = 0

        async def busy_for_a_minute(_, deadline):
            nonlocal sent
            sent += 1
            if loop.time() < 60.0:
                raise ThrottledError("503: full", retry_after_s=5.0)
            if sent == 13:
                raise TransientError("connection reset")
            return sent

        assert await probe.ask((0,), busy_for_a_minute) == 14

        async def busy(_, deadline):
            raise ThrottledError("503: full")

        started = loop.time()
        with pytest.raises(ThrottledError, match="503: full"):
            await probe.ask((0,), busy)
        assert 590.0 < loop.time() - started <= 600.0

    run_on_virtual_time(scenario())


def test_an_endpoint_that_asks_for_longer_than_the_deadline_is_left_alone_for_as_long():
    async def scenario():
        probe = stage(timeout_s=10.0)
        loop = asyncio.get_running_loop()
        sent = []

        async def closed_for_an_hour(_, deadline):
            sent.append(loop.time())
            assert deadline - loop.time() == pytest.approx(10.0)
            assert (probe.in_flight, probe.waiting) == (1, 0)
            if loop.time() < 3600.0:
                raise ThrottledError("429: daily limit", retry_after_s=3600.0)
            return (retry_after_s,) == tuple(each.longest_retry_after_s for each in probe.open)

        retry_after_s = 3600.0
        asking = asyncio.create_task(probe.ask((0,), closed_for_an_hour))
        await asyncio.sleep(1800.0)
        assert (probe.in_flight, probe.waiting) == (0, 1)  # nobody has it meanwhile
        assert await asking
        assert sent == [0.0, 3600.0]

    run_on_virtual_time(scenario())


@pytest.mark.parametrize(
    ("pause_s", "times", "ended_s"),
    [
        (3600.0, pytest.approx(25, abs=2), pytest.approx(24 * 3600.0, rel=0.1)),  # asked each hour, for a day
        (366 * 86_400.0, 3, pytest.approx(5.0, abs=5.0)),  # a run once waited out the stage's ten minutes
    ],
    ids=["an hour", "a year"],
)
def test_pauses_that_an_endpoint_asks_for_have_an_end(pause_s, times, ended_s):
    async def scenario():
        probe, asked = stage(timeout_s=600.0), 0

        async def closed(_, deadline):
            nonlocal asked
            asked += 1
            raise ThrottledError("429: come again", retry_after_s=pause_s)

        with pytest.raises(ThrottledError, match="come again"):
            await probe.ask((0,), closed)
        return asked, asyncio.get_running_loop().time()

    assert run_on_virtual_time(scenario()) == (times, ended_s)


def test_a_request_that_is_throttled_for_long_is_logged_ever_less_often():
    async def scenario():
        probe = stage(timeout_s=600.0)

        async def busy(_, deadline):
            raise ThrottledError("503: full")

        with structlog.testing.capture_logs() as logs, pytest.raises(ThrottledError):
            await probe.ask((0,), busy)
        assert [each["attempt"] for each in logs] == [1, 2, 4, 8, 16, 32, 64, 128]

    run_on_virtual_time(scenario())


def test_virtual_time_names_a_deadlock_instead_of_hanging():
    async def scenario():
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="every task waits"):
        run_on_virtual_time(scenario())


def test_requests_leave_nothing_to_the_garbage_collector_so_it_may_run_rarely():
    probe = stage(concurrency=100, timeout_s=5.0)

    async def answer(_, deadline):
        await asyncio.sleep(1.0)

    async def fail(_, deadline):
        raise TransientError("again")

    async def hang(_, deadline):
        await asyncio.Event().wait()

    async def ask(n):
        with contextlib.suppress(TransientError, DeadlineExceededError):
            await probe.ask((n,), (answer, fail, hang)[n % 3])

    async def scenario():
        async with asyncio.TaskGroup() as group:
            for n in range(300):
                group.create_task(ask(n))
        return gc.collect()

    gc.collect()
    gc.disable()
    try:
        assert run_on_virtual_time(scenario()) < 100
    finally:
        gc.enable()
