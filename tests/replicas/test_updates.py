"""Weight updates and sleep, when a replica is lost or refuses."""

from __future__ import annotations

import asyncio

import pytest
from replica_incidents import Server, SleepingServer, ask, incident, update

from spot_async.errors import (
    DataError,
    Exchange,
    PermanentError,
    ProcessDiedError,
    ServerRestartedError,
    TransientError,
)
from spot_async.replicas.life_cycle import State
from spot_async.types import WeightSnapshot, WeightVersion

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("error", [ProcessDiedError("it must be restarted"), DataError("not its weights")])
def test_a_replica_that_cannot_catch_up_is_started_again_and_ends_nothing(error):
    class Missing(Server):
        async def update_weights(self, snapshot, *, deadline):
            if errors and self is servers[0]:
                raise errors.pop(0)

    errors, servers = [TransientError("reset"), error], []

    async def scenario(pool, made):
        servers.extend(made[0])
        snapshot = await update(pool)
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
        snapshot = await update(pool)
        assert asyncio.get_running_loop().time() > restarted_s
        assert [(each.state, each.version) for each in pool.replicas] == [(State.SERVING, snapshot.version)]

    incident(scenario, make=Restarted, are_ours=False)


def test_an_update_that_a_lone_server_refuses_fails_and_leaves_it_as_it_was():
    class Refusing(Server):
        async def update_weights(self, snapshot, *, deadline):
            raise PermanentError("not these")

    async def scenario(pool, made):
        with pytest.raises(PermanentError, match="not these"):
            await update(pool)

        async def answer(server):
            return "as before"

        assert await ask(pool, answer) == "as before"
        assert pool.replicas[0].restarts == 0

    incident(scenario, make=Refusing)


@pytest.mark.parametrize("slow", ["enter", "update"])
def test_a_replica_that_comes_back_is_put_to_sleep_after_it_has_its_weights(slow):
    log = []

    class Sleeping(SleepingServer):
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
        await update(pool)
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

    class Away(SleepingServer):
        async def __aenter__(self):
            if 0.0 < asyncio.get_running_loop().time() < returns_s:
                raise TransientError("connection refused")
            return self

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
        snapshot = await update(pool)
        await asyncio.sleep(100.0)
        assert [each.restarts for each in pool.replicas] == [0, 0]
        assert {each.version for each in pool.replicas} == {snapshot.version}

    incident(scenario, make=Slow, number=2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_replica_that_does_not_wake_is_entered_again_and_ends_the_run_only_where_none_wakes(number):
    class Sleeping(SleepingServer):
        async def wake(self, *, deadline):
            if self is servers[0]:
                raise TransientError("still asleep")

    servers = []

    async def scenario(pool, made):
        servers.extend(made[0])
        later = asyncio.get_running_loop().time() + 60.0
        await pool.sleep(deadline=later)
        if number == 1:
            with pytest.raises(TransientError, match="still asleep"):
                await pool.wake(deadline=later)
            return
        await pool.wake(deadline=later)
        await asyncio.sleep(10.0)
        assert [(each.state, each.restarts) for each in pool.replicas] == [(State.SERVING, 1), (State.SERVING, 0)]

    incident(scenario, make=Sleeping, number=number)


@pytest.mark.parametrize("turns", range(4, 10))
def test_a_replica_that_is_lost_as_an_update_begins_ends_nothing_and_gets_the_weights_when_it_is_back(turns):
    """It is taken out some turns of the loop after its end: perhaps between the update's start and first request."""

    async def scenario(pool, made):
        await asyncio.sleep(1.0)
        made[0][0].kill()
        for _ in range(turns):
            await asyncio.sleep(0)
        snapshot = await update(pool)
        await asyncio.sleep(10.0)
        assert [(each.version, each.restarts) for each in pool.replicas] == [
            (snapshot.version, 1),
            (snapshot.version, 0),
        ]

    class Starting(Server):
        async def __aenter__(self):
            await asyncio.sleep(1.0)
            return await super().__aenter__()

        async def update_weights(self, snapshot, *, deadline):
            if self.ended.done():
                raise refused_connection()

    for order in range(10):
        incident(scenario, make=Starting, number=2, ready_order=order)


@pytest.mark.parametrize("error", [ServerRestartedError("another instance"), refused_connection()])
@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_lone_endpoint_that_is_restarted_before_or_in_its_sleep_ends_nothing(error, is_asleep):
    """Nobody asks it anything then, so that its end is noticed when it is to sleep or to wake."""

    class Sleeping(SleepingServer):
        async def sleep(self, *, deadline):
            if self is lost[0] and not is_asleep:
                raise error

        async def wake(self, *, deadline):
            if self is lost[0]:
                raise error

        async def update_weights(self, snapshot, *, deadline):
            if self is lost[0]:
                raise error

    lost = []

    async def scenario(pool, made):
        lost.extend(made[0])
        until_s = asyncio.get_running_loop().time() + 60.0
        await pool.sleep(deadline=until_s)
        await asyncio.sleep(20.0)
        assert len(made[0]) == 1  # it is not brought back while the trainer uses its devices
        await pool.wake(deadline=until_s)
        await update(pool)
        assert [each.state for each in pool.replicas] == [State.SERVING]
        assert len(made[0]) == 2

    incident(scenario, make=Sleeping, are_ours=False)


def test_an_update_that_is_cut_short_is_made_up_for_by_the_next_and_no_server_is_started_again():
    """As where the trainer is lost meanwhile. The weights that were being sent may be gone by then."""

    class Slow(Server):
        async def update_weights(self, snapshot, *, deadline):
            sent.append(snapshot.directory)
            await asyncio.sleep(0.0 if self is servers[0] else 5.0)

    sent, servers = [], []

    async def scenario(pool, made):
        servers.extend(made[0])
        loop = asyncio.get_running_loop()
        void = WeightSnapshot(directory="void", version=WeightVersion(0, 3))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await pool.update_weights(void, deadline=loop.time() + 60.0)
        pool.withdraw_weights()
        await asyncio.sleep(60.0)
        assert sent == ["void"] * 2
        again = WeightSnapshot(directory="again", version=WeightVersion(1, 2))
        await pool.update_weights(again, deadline=loop.time() + 60.0)
        assert [(each.state, each.version) for each in pool.replicas] == [(State.SERVING, again.version)] * 2
        assert [each.restarts for each in pool.replicas] == [0, 0]

    incident(scenario, make=Slow, number=2)


def test_weights_that_are_void_are_not_sent_to_a_server_that_comes_back():
    class Ending(Server):
        async def update_weights(self, snapshot, *, deadline):
            sent.append(snapshot.directory)

    sent = []

    async def scenario(pool, made):
        loop = asyncio.get_running_loop()
        await pool.update_weights(
            WeightSnapshot(directory="void", version=WeightVersion(0, 3)), deadline=loop.time() + 60.0
        )
        pool.withdraw_weights()
        made[0][0].kill()
        await asyncio.sleep(60.0)
        again = WeightSnapshot(directory="again", version=WeightVersion(1, 2))
        await pool.update_weights(again, deadline=loop.time() + 60.0)
        assert sent == ["void", "again"]
        assert [(each.state, each.restarts) for each in pool.replicas] == [(State.SERVING, 1)]

    incident(scenario, make=Ending)
