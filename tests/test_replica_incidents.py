"""What a pool makes of one incident at a replica: requests come back cleanly, the healthy are left alone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import structlog

from spot_async.concurrency import watched
from spot_async.config import ServingConfig
from spot_async.errors import (
    BudgetSpentError,
    DataError,
    DeadlineExceededError,
    Exchange,
    PermanentError,
    ProcessDiedError,
    RequestError,
    ServerRestartedError,
    TransientError,
)
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.replicas.service_pool import Errand
from spot_async.simulation.virtual_time import run_on_virtual_time
from spot_async.types import Capabilities, WeightSnapshot, WeightVersion

OFFERS = Capabilities(
    model="m",
    vocab_size=8,
    vocab_fingerprint="f",
    max_context_tokens=100,
    max_top_k=8,
    exact_entropy=True,
    candidate_logprobs="none",
    weight_update=True,
)


@pytest.fixture(autouse=True)
def _quiet():
    with structlog.testing.capture_logs():
        yield


class Server:
    """A backend object; pinged well unless it is frozen."""

    def __init__(self):
        self.ended = asyncio.get_running_loop().create_future()
        self.is_left = False
        self.is_frozen = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        self.is_left = True

    async def capabilities(self, *, deadline):
        return OFFERS

    async def watch(self):
        await asyncio.shield(self.ended)

    async def ping(self, *, deadline):
        await asyncio.sleep(0.001)
        if self.is_frozen:
            raise DeadlineExceededError("no answer to a ping")

    def kill(self):
        self.ended.set_exception(ProcessDiedError("it was killed"))


async def ask(pool, request, *, errand=None):
    """What `request(server)` gives, or the error that it fails with."""
    try:
        async with await pool.lease(errand or Errand("score", (0,))) as server:
            return await request(server)
    except RequestError as error:
        return error


async def reset(server):
    raise TransientError("connection reset")


def incident(scenario, *, make=Server, number=1, are_ours=True, **serving):
    """`scenario(pool, made)` beside the pool's watch; `made` are all backend objects, by the replica's number."""

    async def run():
        made = [[] for _ in range(number)]

        def factory(i):
            made[i].append(make())
            return made[i][-1]

        factories = {f"r{i}": (lambda i=i: factory(i)) for i in range(number)}
        async with ReplicaPool("teacher", factories, ServingConfig(**serving), are_ours=are_ours) as pool:
            await watched(scenario(pool, made), [pool.watch])

    run_on_virtual_time(run())


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
        lease = await pool.lease(Errand("score", (0,)))
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


@pytest.mark.parametrize("error", [ProcessDiedError("it must be restarted"), DataError("not its weights")])
def test_a_replica_that_cannot_catch_up_is_started_again_and_ends_nothing(error):
    class Missing(Server):
        async def update_weights(self, snapshot, *, deadline):
            if errors and self is servers[0]:
                raise errors.pop(0)

    errors, servers = [TransientError("reset"), error], []

    async def scenario(pool, made):
        servers.extend(made[0])
        snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
        await pool.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 60.0)
        await asyncio.sleep(10.0)
        assert [each.state for each in pool.replicas] == [State.SERVING] * 2
        assert [each.restarts for each in pool.replicas] == [1, 0]
        assert {each.version for each in pool.replicas} == {snapshot.version}

    incident(scenario, make=Missing, number=2)


def refused_connection():
    error = TransientError("nothing answers")
    error.exchange = Exchange("http://a", "POST", "/update_weights", 2, {})
    return error


@pytest.mark.parametrize("error", [ServerRestartedError("another instance"), refused_connection()])
def test_an_update_outlives_a_lone_endpoint_that_is_restarted_while_nobody_asks_it(error):
    """As a student's is while the trainer trains: its end is noticed by the update alone."""
    restarted_s = 40.0

    class Restarted(Server):
        async def __aenter__(self):
            if 0.0 < asyncio.get_running_loop().time() < restarted_s:
                raise TransientError("connection refused")
            return await super().__aenter__()

        async def ping(self, *, deadline):
            if self is servers[0]:
                raise error

        async def update_weights(self, snapshot, *, deadline):
            if self is servers[0]:
                raise error

    servers = []

    async def scenario(pool, made):
        servers.extend(made[0])
        await asyncio.sleep(1.0)
        snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
        await pool.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 100.0)
        assert asyncio.get_running_loop().time() > restarted_s
        assert [(each.state, each.version) for each in pool.replicas] == [(State.SERVING, snapshot.version)]

    incident(scenario, make=Restarted, are_ours=False)


def test_an_update_that_a_lone_server_refuses_fails_and_leaves_it_as_it_was():
    class Refusing(Server):
        async def update_weights(self, snapshot, *, deadline):
            raise PermanentError("not these")

    async def scenario(pool, made):
        snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
        with pytest.raises(PermanentError, match="not these"):
            await pool.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 60.0)

        async def answer(server):
            return "as before"

        assert await ask(pool, answer) == "as before"
        assert pool.replicas[0].restarts == 0

    incident(scenario, make=Refusing)


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


@pytest.mark.parametrize("slow", ["enter", "update"])
def test_a_replica_that_comes_back_is_put_to_sleep_after_it_has_its_weights(slow):
    log = []

    class Sleeping(Server):
        sleeps_while_training = True
        is_asleep = False

        async def __aenter__(self):
            await asyncio.sleep(10.0 if slow == "enter" else 0.0)
            return self

        async def sleep(self, *, deadline):
            self.is_asleep = True
            log.append("sleep")

        async def wake(self, *, deadline):
            self.is_asleep = False

        async def update_weights(self, snapshot, *, deadline):
            assert not self.is_asleep
            await asyncio.sleep(1.0 if slow == "enter" else 10.0)
            assert not self.is_asleep
            log.append("update")

    async def scenario(pool, made):
        later = asyncio.get_running_loop().time() + 600.0
        snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
        await pool.update_weights(snapshot, deadline=later)
        log.clear()
        made[0][0].kill()
        await asyncio.sleep(5.0)
        await pool.sleep(deadline=later)
        assert log == ["update", "sleep"]
        await asyncio.sleep(10.0)
        await pool.wake(deadline=later)
        assert [each.state for each in pool.replicas] == [State.SERVING]

    incident(scenario, make=Sleeping)


def test_a_role_that_lost_its_last_server_needs_none_while_it_sleeps():
    """Nor is one brought back then: training may take longer than anybody would wait for a server."""
    returns_s, patience_s = 300.0, 100.0

    class Away(Server):
        sleeps_while_training = True

        async def __aenter__(self):
            if 0.0 < asyncio.get_running_loop().time() < returns_s:
                raise TransientError("connection refused")
            return self

        async def sleep(self, *, deadline):
            pass

        async def wake(self, *, deadline):
            pass

    async def scenario(pool, made):
        later = asyncio.get_running_loop().time() + 1000.0
        await asyncio.sleep(1.0)
        made[0][0].kill()
        await asyncio.sleep(10.0)
        await pool.sleep(deadline=later)
        await asyncio.sleep(returns_s)
        await pool.wake(deadline=later)
        await asyncio.sleep(60.0)
        assert [each.state for each in pool.replicas] == [State.SERVING]

    incident(scenario, make=Away, are_ours=False, recovery_timeout_s=patience_s)


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
    """As hedges do: the other server answers each time, long before the frozen one has had a request for `stall_s`."""

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


def test_a_replica_that_missed_weights_may_take_longer_for_them_than_a_silence():
    class Slow(Server):
        async def update_weights(self, snapshot, *, deadline):
            if self is servers[0]:
                if errors:
                    raise errors.pop()
                await asyncio.sleep(45.0)

    errors, servers = [TransientError("reset")], []

    async def scenario(pool, made):
        servers.extend(made[0])
        snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
        await pool.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 60.0)
        await asyncio.sleep(100.0)
        assert [each.restarts for each in pool.replicas] == [0, 0]
        assert {each.version for each in pool.replicas} == {snapshot.version}

    incident(scenario, make=Slow, number=2)
