"""No minute holds more than its limit and a second's worth; whoever asks an endpoint to wait is left alone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.errors import RequestError, ThrottledError
from spot_async.simulation.virtual_time import run_on_virtual_time
from spot_async.spending.account import Account
from spot_async.spending.prices import Size
from spot_async.spending.rate_limit import RateLimiter


def leave(limit, sizes, *, after=()):
    """Times at which requests of these sizes leave, each as early as it may, and no earlier than its place `after`."""
    now, times = 0.0, []
    for index, tokens in enumerate(sizes):
        now = max(now, after[index] if after else 0.0)
        now += limit.delay_s(now, tokens)
        assert limit.delay_s(now, tokens) == 0
        limit.take(now, tokens)
        times.append(now)
    return times


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=40, deadline=None)
@given(rpm=st.floats(1, 600), count=st.integers(2, 200))
def test_a_limit_that_is_always_asked_for_is_used_up(rpm, count):
    times = leave(RateLimiter(requests_per_minute=rpm), [1] * count)
    assert times[-1] <= (count - 1) * 60 / rpm + 1e-6


def test_what_a_request_did_not_take_is_given_back():
    limit = RateLimiter(tokens_per_minute=6000)  # 100 a second
    limit.take(0.0, 1000)
    assert limit.delay_s(0.0, 100) == pytest.approx(10.0)
    limit.settle(0.0, taken=1000, used=150)
    assert limit.delay_s(0.0, 100) == pytest.approx(1.5)


def test_a_retry_after_holds_back_every_request_of_the_endpoint():
    async def run():
        loop, limit, account = asyncio.get_running_loop(), RateLimiter(), Account("teacher")
        left = []

        async def send(error=None):
            async with account.request("there", Size(prompt_tokens=1, max_completion_tokens=1), limit) as charge:
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
    size = Size(prompt_tokens=1, max_completion_tokens=1)

    async def refusal(account, limit, *, deadline=10.0):
        with pytest.raises(RequestError) as raised:
            async with account.request("there", size, limit, deadline):
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
        limited.rate_limit.take(0.0, 1)
        limited.rate_limit.claim()
        late, at_s = await refusal(limited, limited.rate_limit)
        assert (at_s, "requests_per_minute" in str(late)) == (10.0, True)

        budgeted = Account("teacher", token_budget=3)
        async with budgeted.request("there", size, RateLimiter(), 20.0):
            late, _ = await refusal(budgeted, RateLimiter(), deadline=20.0)
            assert "no room in the budget" in str(late)
            await asyncio.sleep(50.0)  # what is done with a turn has its own deadline

    run_on_virtual_time(run())


def test_a_turn_that_was_granted_before_is_not_waited_for_again():
    async def run():
        loop, account = asyncio.get_running_loop(), Account("teacher", requests_per_minute=6)
        size = Size(prompt_tokens=1, max_completion_tokens=1)
        left = []
        for granted in (True, False):
            if granted:
                account.rate_limit.take(loop.time(), 2)
            async with account.request("there", size, account.rate_limit) as charge:
                left.append(loop.time())
                charge.answered(b"{}")
        return left

    first, second = run_on_virtual_time(run())
    assert (first, second - first) == (0.0, pytest.approx(10.0))
