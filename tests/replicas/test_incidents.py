"""One incident at a replica: its requests come back cleanly, and healthy replicas are left alone."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
from replica_incidents import OFFERS, Server, ask, incident

from spot_async.errors import (
    BudgetSpentError,
    Exchange,
    PermanentError,
    ServerRestartedError,
    TransientError,
)
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import State

pytestmark = pytest.mark.usefixtures("quiet")


async def reset(server):
    raise TransientError("connection reset")


def test_a_lost_replica_is_left_only_after_its_requests_have_ended():
    """They may still have to tell the server that nobody waits for them."""

    async def scenario(pool, made):
        async def request(server):
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                await asyncio.sleep(1.0)
                assert not server.is_left
                raise

        task = asyncio.create_task(ask(pool, request))
        await asyncio.sleep(1.0)
        made[0][0].kill()
        assert "given up" in str(await task)
        await asyncio.sleep(1.0)
        assert made[0][0].is_left
        assert pool.replicas[0].state is State.SERVING

    incident(scenario)


def test_a_request_that_takes_its_time_to_end_outlives_a_second_incident():
    async def scenario(pool, made):
        async def request(server):
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                await asyncio.sleep(60.0)  # such as an abort that a server does not answer
                raise

        task = asyncio.create_task(ask(pool, request))
        await asyncio.sleep(1.0)
        made[0][0].kill()
        await asyncio.sleep(20.0)
        assert len(made[0]) == 2
        made[0][1].kill()
        assert "given up: its process ended (it was killed)" in str(await task)
        assert [(each.state, each.in_flight) for each in pool.replicas] == [(State.SERVING, 0)]

    incident(scenario, stall_s=10.0)


def test_a_lease_that_was_taken_back_before_it_is_used_sends_nothing():
    async def scenario(pool, made):
        lease = await pool.lease(LeaseRequest("score", (0,)))
        made[0][0].kill()
        await asyncio.sleep(1.0)
        with pytest.raises(TransientError, match="r0: given up"):
            async with lease:
                pytest.fail("sent to a server that was lost")
        await asyncio.sleep(1.0)
        assert [each.in_flight for each in pool.replicas] == [0]
        assert pool.replicas[0].restarts == 1

    incident(scenario)


def test_a_healthy_replica_on_trial_may_wait_for_a_request_for_as_long_as_it_takes():
    """Such as through the training of a batch, when nobody asks the teacher."""

    async def scenario(pool, made):
        for _ in range(3):
            await ask(pool, reset)
        await asyncio.sleep(1.0)
        assert pool.replicas[0].state is State.HALF_OPEN
        await asyncio.sleep(1000.0)
        assert pool.replicas[0].away_s == 0.0

    incident(scenario, are_ours=False, recovery_timeout_s=100.0)


def test_a_burst_of_resets_that_comes_in_over_a_while_ends_no_healthy_server():
    async def scenario(pool, made):
        async def reset_after(seconds):
            async def request(server):
                await asyncio.sleep(seconds)
                return await reset(server)

            return await ask(pool, request)

        async def long(server):
            await asyncio.sleep(30.0)
            return "done"

        burst = [asyncio.create_task(reset_after(seconds)) for seconds in (1.0, 1.0, 1.0, 1.5)]
        assert await ask(pool, long) == "done"
        await asyncio.gather(*burst)
        assert pool.replicas[0].restarts == 0
        assert pool.replicas[0].state is State.SERVING

    incident(scenario)


def test_one_restart_that_many_requests_notice_is_answered_once():
    async def scenario(pool, made):
        async def noticed_after(turns):
            async def request(server):
                await asyncio.sleep(1.0)
                for _ in range(turns):
                    await asyncio.sleep(0)
                raise ServerRestartedError("another instance")

            return await ask(pool, request)

        await asyncio.gather(*(noticed_after(turns) for turns in range(8)))
        await asyncio.sleep(10.0)
        assert pool.replicas[0].state is State.SERVING
        assert pool.replicas[0].restarts == 1

    incident(scenario, are_ours=False)


def test_what_a_backend_refuses_by_itself_says_nothing_of_its_server():
    async def scenario(pool, made):
        def failing(error):
            async def request(server):
                raise error

            return request

        for _ in range(3):
            await ask(pool, reset)
        await asyncio.sleep(1.0)
        await ask(pool, failing(PermanentError("no such token")))
        assert pool.replicas[0].state is State.HALF_OPEN
        refused = PermanentError("HTTP 400")
        refused.exchange = Exchange("http://a", "POST", "/score", 2, {}, status=400)
        await ask(pool, failing(refused))
        assert pool.replicas[0].state is State.SERVING

    incident(scenario, are_ours=False)


def test_a_replica_that_cannot_be_entered_for_want_of_money_ends_the_run_as_such():
    made_ones = []

    class Paid(Server):
        async def __aenter__(self):
            made_ones.append(self)
            if len(made_ones) > 1:
                raise BudgetSpentError("teacher.backend.budget=1 EUR is spent")
            return self

    async def scenario(pool, made):
        made[0][0].kill()
        await asyncio.sleep(5000.0)

    with pytest.raises(BaseExceptionGroup) as raised:
        incident(scenario, make=Paid)
    assert raised.group_contains(BudgetSpentError)
    assert len(made_ones) == 2


def test_an_endpoint_that_is_gone_overnight_is_tried_until_it_is_back_and_ends_nothing():
    hour_s = 3600.0

    class Endpoint(Server):
        async def __aenter__(self):
            if 1.0 < asyncio.get_running_loop().time() < 10 * hour_s:
                raise TransientError("connection refused")
            return self

    async def scenario(pool, made):
        await asyncio.sleep(2.0)
        made[0][0].kill()
        await asyncio.sleep(10 * hour_s - 3.0)
        assert [each.state for each in pool.replicas] == [State.RECOVERING, State.SERVING]
        await asyncio.sleep(60.0)
        assert [each.state for each in pool.replicas] == [State.SERVING] * 2

    incident(scenario, make=Endpoint, number=2, are_ours=False)


def test_a_frozen_replica_is_noticed_although_its_requests_are_given_up_early():
    """At a short deadline, or with their prompt: no request of the frozen one lasts for `stall_s`."""

    async def scenario(pool, made):
        async def given_up(server):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3.0):
                    await asyncio.sleep(1000.0)
            raise asyncio.CancelledError

        made[0][0].is_frozen = True
        for _ in range(4):
            assert pool.replicas[0].restarts == 0
            with contextlib.suppress(asyncio.CancelledError):
                await ask(pool, given_up)
            await asyncio.sleep(60.0)  # idle time says nothing
        assert pool.replicas[0].restarts == 1

    incident(scenario, stall_s=10.0)


def test_a_replica_that_cannot_be_left_takes_no_time_from_the_others():
    class Leaving(Server):
        async def __aexit__(self, *exc_info):
            if self is servers[0]:
                raise OSError("gone")
            await asyncio.sleep(5.0)
            await super().__aexit__(*exc_info)

    servers = []

    async def scenario(pool, made):
        servers.extend(each[0] for each in made)

    with pytest.raises(OSError, match="gone"):
        incident(scenario, make=Leaving, number=2)
    assert servers[1].is_left


def test_a_server_that_returns_with_less_is_asked_again_until_it_is_whole():
    """A gateway that fails while it starts may seem not to take token ids: the run went by what was found first."""
    found = [OFFERS, msgspec.structs.replace(OFFERS, max_top_k=1), OFFERS]

    class Returning(Server):
        async def capabilities(self, *, deadline):
            return found.pop(0)

    async def scenario(pool, made):
        made[0][0].kill()
        await asyncio.sleep(60.0)
        assert not found
        assert len(made[0]) == 3
        assert pool.replicas[0].state is State.SERVING

    incident(scenario, make=Returning)
