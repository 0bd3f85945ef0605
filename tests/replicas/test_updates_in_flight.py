"""Weight updates of servers that have requests in flight: deadlines, freezes, and one update at a time."""

from __future__ import annotations

import asyncio

import pytest
from replica_incidents import Server, incident

from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import both, gather
from spot_async.errors import DeadlineExceededError, PermanentError, TransientError
from spot_async.replicas.concurrency_limit import WINDOW_REQUESTS
from spot_async.replicas.life_cycle import State
from spot_async.stages.stage import Stage, StageLimits
from spot_async.types import WeightSnapshot, WeightVersion

pytestmark = pytest.mark.usefixtures("quiet")

TIMEOUT_S, UPDATE_S, LONGEST_S = 10.0, 30.0, 600.0
SNAPSHOT = WeightSnapshot(directory="w", version=WeightVersion(0, 1))


class Slow(Server):
    """Takes its time over weights."""

    async def update_weights(self, snapshot, *, deadline):
        await asyncio.sleep(UPDATE_S)


def now_s():
    return asyncio.get_running_loop().time()


def stage_of(pool, *, attempts=3):
    return Stage(
        "rollout",
        pool,
        StageLimits(
            concurrency=99,
            timeout_s=TIMEOUT_S,
            retry=RetryPolicy(attempts),
            waiting_capacity=99,
            longest_standstill_s=LONGEST_S,
        ),
        jitter=lambda: 0.0,
    )


def asked(pool, request, **settings):
    return asyncio.create_task(stage_of(pool, **settings).ask((0,), request))


async def update(pool):
    await pool.update_weights(SNAPSHOT, deadline=now_s() + LONGEST_S)


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_request_has_as_much_time_after_an_update_as_it_had_left_before_it(is_answered):
    async def scenario(pool, made):
        told = []

        async def request(server, deadline):
            told.append(deadline)
            await asyncio.sleep(UPDATE_S + TIMEOUT_S + (-0.1 if is_answered else 0.1))

        began_s, asking = now_s(), asked(pool, request)
        await asyncio.sleep(4.0)
        await update(pool)
        assert told == [began_s + TIMEOUT_S + LONGEST_S]  # the server cannot be told later, so it was told before
        if is_answered:
            await asking
        else:
            with pytest.raises(DeadlineExceededError, match="no answer within 10 s"):
                await asking
            assert now_s() == pytest.approx(began_s + UPDATE_S + TIMEOUT_S)

    incident(scenario, make=Slow)


def test_an_attempt_that_an_update_ended_leaves_its_time_to_the_next():
    """The server may abort what it has, and the clock continues as the request leaves it."""

    async def scenario(pool, made):
        ends_s = [20.0, TIMEOUT_S - 4.0 - 0.5]

        async def request(server, deadline):
            await asyncio.sleep(ends_s.pop(0))
            if ends_s:
                raise TransientError("aborted")

        asking = asked(pool, request)
        await asyncio.sleep(4.0)
        await update(pool)  # the next attempt waits for it, which does not count either
        await asking
        assert not ends_s

    incident(scenario, make=Slow)


def test_a_server_that_freezes_over_new_weights_loses_its_requests():
    class Freezing(Server):
        async def update_weights(self, snapshot, *, deadline):
            self.is_frozen = self is servers[0]
            await asyncio.sleep(1000.0 if self.is_frozen else 1.0)

    servers = []

    async def scenario(pool, made):
        servers.extend(made[0])

        async def request(server, deadline):
            await asyncio.sleep(1000.0 if server.is_frozen or server is servers[0] else 1.0)
            return server

        asking = asked(pool, request)
        await asyncio.sleep(1.0)
        await update(pool)
        assert await asking is not servers[0]
        assert now_s() < 300.0

    incident(scenario, make=Freezing, number=2, stall_s=20.0)


def test_two_updates_of_a_role_at_a_time_are_a_bug():
    async def scenario(pool, made):
        first = asyncio.create_task(update(pool))
        await asyncio.sleep(1.0)
        with pytest.raises(ValueError, match=r"weights 0\.1 are sent while others are: one update at a time"):
            await update(pool)
        await first
        await update(pool)  # one after the other is none

    incident(scenario, make=Slow)


def test_the_time_that_an_update_takes_does_not_lower_the_limit_of_a_replica():
    async def scenario(pool, made):
        async def window(seconds):
            stage = stage_of(pool)
            await gather(stage.ask((n,), lambda *given: asyncio.sleep(seconds)) for n in range(WINDOW_REQUESTS))

        async def update_soon():
            await asyncio.sleep(0.5)
            await update(pool)

        for _ in range(3):
            await window(1.0)
        for _ in range(3):
            await both(window(UPDATE_S + 1.0), update_soon())
        assert pool.replicas[0].decreases == 0

    incident(scenario, make=Slow)


def test_a_replica_that_recovers_beside_an_update_keeps_weights_that_others_refuse():
    class Refusing(Server):
        async def __aenter__(self):
            await asyncio.sleep(5.0)
            return self

        async def update_weights(self, snapshot, *, deadline):
            await asyncio.sleep(10.0)
            if self is servers[0] and errors:
                await asyncio.sleep(20.0)
                raise errors.pop()

    errors, servers = [PermanentError("not these")], []

    async def scenario(pool, made):
        servers.extend(made[0])
        made[1][0].kill()
        await asyncio.sleep(1.0)
        await update(pool)  # the other has them, so this is no failure
        await asyncio.sleep(100.0)
        assert [each.version for each in pool.replicas] == [SNAPSHOT.version] * 2
        assert pool.replicas[1].state is State.SERVING

    incident(scenario, make=Refusing, number=2)
