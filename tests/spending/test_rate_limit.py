"""No minute holds more than its limit and a second's worth, and an endpoint that asks for a pause is left alone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.errors import RequestError, ThrottledError
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import Replica
from spot_async.replicas.scheduler import Scheduler
from spot_async.spending.account import Account
from spot_async.spending.prices import Size
from spot_async.spending.rate_limit import LEASED, RateLimiter
from spot_async.testing.virtual_time import run_on_virtual_time


def leave(limit, sizes, *, after=()):
    """Times at which requests of these sizes leave, each as early as it may, and no earlier than its place `after`."""
    now, times = 0.0, []
    for index, tokens in enumerate(sizes):
        now = max(now, after[index] if after else 0.0)
        now += limit.delay_s(now, tokens)
        assert limit.delay_s(now, tokens) == 0
        limit.send(now, limit.grant(tokens))
        times.append(now)
    return times


@settings(max_examples=60)
@given(
    rpm=st.floats(1, 600),
    tpm=st.floats(100, 100_000),
    requests=st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 3)), min_size=1, max_size=150),
)
def test_every_window_stays_within_the_limits_and_a_burst(rpm, tpm, requests):
    sizes = [tokens for tokens, _ in requests]
    after, at = [], 0.0
    for _, pause in requests:
        at += pause
        after.append(at)
    times = leave(RateLimiter(rpm, tpm), sizes, after=after)
    for first, start in enumerate(times):
        inside = [i for i in range(first, len(times)) if times[i] - start < 60]
        assert len(inside) <= rpm + max(1, rpm / 60) + 1e-3
        # one that is larger than the burst leaves a full bucket in debt
        assert sum(sizes[i] for i in inside) <= tpm + max(1, tpm / 60) + max(sizes[i] for i in inside) + 1e-3


@settings(max_examples=40)
@given(rpm=st.floats(1, 600), count=st.integers(2, 200))
def test_a_limit_that_is_always_asked_for_is_used_up(rpm, count):
    times = leave(RateLimiter(requests_per_minute=rpm), [1] * count)
    assert times[-1] <= (count - 1) * 60 / rpm + 1e-6


def test_what_a_request_did_not_take_is_given_back():
    limit = RateLimiter(tokens_per_minute=6000)  # 100 a second
    limit.send(0.0, limit.grant(1000))
    assert limit.delay_s(0.0, 100) == pytest.approx(10.0)
    limit.settle(0.0, taken=1000, used=150)
    assert limit.delay_s(0.0, 100) == pytest.approx(1.5)


SIZE = Size(prompt_tokens=1, max_completion_tokens=1)


def scheduler(limit):
    """Of one server that is there."""
    replica = Replica("r", object, object(), max_in_flight=9)
    replica.life.move(State.SERVING, 0.0)
    return Scheduler([replica], limit)


def test_a_retry_after_holds_back_every_request_of_the_endpoint():
    async def run():
        loop, limit, account = asyncio.get_running_loop(), RateLimiter(), Account("teacher")
        left = []

        async def send(error=None):
            async with account.request("there", SIZE, limit) as charge:
                left.append(loop.time())
                if error is not None:
                    raise error
                charge.answered(b"{}")

        started = loop.time()
        with pytest.raises(ThrottledError):
            await send(ThrottledError("429", retry_after_s=7.0))
        await asyncio.gather(send(), send())
        return [at - started for at in left]

    assert run_on_virtual_time(run()) == pytest.approx([0.0, 7.0, 7.0])


def test_who_cannot_leave_before_the_deadline_is_told_what_stands_in_the_way():
    async def refusal(account, limit, *, deadline=10.0):
        with pytest.raises(RequestError) as raised:
            async with account.request("there", SIZE, limit, deadline):
                pass
        assert not raised.value.was_sent
        return raised.value, asyncio.get_running_loop().time()

    async def run():
        held, free = RateLimiter(), Account("teacher")
        held.hold(0.0, 700.0)
        told, at_s = await refusal(free, held)
        assert (type(told), told.retry_after_s, at_s) == (ThrottledError, 700.0, 0.0)
        assert "asked to be left alone" in str(told)

        limited = Account("teacher", requests_per_minute=1)
        limited.rate_limit.send(0.0, limited.rate_limit.grant(1))
        late, at_s = await refusal(limited, limited.rate_limit)
        assert (at_s, "requests_per_minute" in str(late)) == (10.0, True)

        budgeted = Account("teacher", token_budget=3)
        async with budgeted.request("there", SIZE, RateLimiter(), 20.0):
            late, _ = await refusal(budgeted, RateLimiter(), deadline=20.0)
            assert "no room in the budget" in str(late)
            await asyncio.sleep(50.0)  # what is done with a turn has its own deadline

    run_on_virtual_time(run())


def test_only_the_first_request_of_a_lease_goes_by_its_grant():
    async def run():
        loop, account = asyncio.get_running_loop(), Account("teacher", requests_per_minute=6)
        left = []
        leased = LEASED.set(account.rate_limit.grant(2))
        for _ in range(2):
            async with account.request("there", SIZE, account.rate_limit) as charge:
                left.append(loop.time())
                charge.answered(b"{}")
        LEASED.reset(leased)
        return left

    first, second = run_on_virtual_time(run())
    assert (first, second - first) == (0.0, pytest.approx(10.0))


@settings(max_examples=80)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["grant", "send", "give back", "again"]), st.integers(0, 200), st.floats(0, 3)),
        max_size=60,
    ),
)
def test_a_grant_that_nothing_was_sent_for_leaves_no_trace(steps):
    """Whatever is granted, sent for late or never, what leaves stays within the limits, and nothing else counts."""
    limit, only_sent = RateLimiter(60, 6000), RateLimiter(60, 6000)
    now, open_grants, sent = 0.0, [], []
    for kind, number, pause in steps:
        now += pause
        if kind == "grant" and limit.delay_s(now, number) == 0:
            open_grants.append(limit.grant(number))
        elif kind != "grant" and open_grants:
            grant = open_grants.pop(number % len(open_grants))
            if kind == "send":
                limit.send(now, grant)
                assert only_sent.delay_s(now, grant.tokens) == pytest.approx(0, abs=1e-6)
                only_sent.send(now, only_sent.grant(grant.tokens))
                sent.append((now, grant.tokens))
            limit.give_back(grant)
            if kind == "again":
                limit.give_back(grant)
            assert limit.claim(grant) is None
    for grant in open_grants:
        limit.give_back(grant)
    assert limit.delay_s(now, 200) == pytest.approx(only_sent.delay_s(now, 200), abs=1e-6)
    for start, _ in sent:
        within = [tokens for at, tokens in sent if start <= at < start + 1]
        assert len(within) <= 2 + 1e-3
        assert sum(within) <= 100 + 100 + 200


def test_a_lease_that_nothing_was_sent_under_gives_its_room_back():
    """Such as one that was revoked or cancelled on the way, or whose request was refused at the edge."""

    async def run():
        loop, account = asyncio.get_running_loop(), Account("teacher", requests_per_minute=6)
        pool = scheduler(account.rate_limit)

        async def ask(number, *, is_sent):
            async with await pool.lease(LeaseRequest("score", (number,), tokens=2)):
                if is_sent:
                    async with account.request("there", SIZE, account.rate_limit) as charge:
                        charge.answered(b"{}")
            return loop.time()

        async with asyncio.timeout(60):
            unused = [await ask(i, is_sent=False) for i in range(3)]
            first = await ask(3, is_sent=True)
            waiting = asyncio.create_task(ask(4, is_sent=False))
            await asyncio.sleep(10)
            waiting.cancel()  # as its turn comes
            return unused, first, await ask(5, is_sent=True), await ask(6, is_sent=True)

    assert run_on_virtual_time(run()) == ([0, 0, 0], 0, pytest.approx(10), pytest.approx(20))


@pytest.mark.parametrize("places", [2, 99])
def test_requests_of_a_lease_wait_for_no_later_lease(places):
    """Nor for one that waits for them: servers that are asked one by one take so many `places` at a time."""

    async def run():
        loop, account = asyncio.get_running_loop(), Account("teacher", requests_per_minute=60)
        pool, singles = scheduler(account.rate_limit), asyncio.Semaphore(places)
        started = loop.time()

        async def send():
            async with singles, account.request("there", SIZE, account.rate_limit, started + 300) as charge:
                charge.answered(b"{}")

        async def ask(number):
            async with await pool.lease(LeaseRequest("score", (number,), tokens=2)), asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(send())
            return loop.time() - started

        return await asyncio.gather(*map(ask, range(5)))

    assert run_on_virtual_time(run()) == pytest.approx([3, 7, 11, 15, 19])  # one a second
