"""Pools that share GPUs in time: one is awake, the others sleep, and nobody starves. On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial

import hypothesis
import pytest
from hypothesis import strategies as st
from ready_order import run_shuffled
from replica_incidents import Server, ask

from spot_async.base.tasks import alongside, leaves
from spot_async.errors import PermanentError
from spot_async.loop.publishing import SleepingServers
from spot_async.replicas.gpu_time_sharing import GpuTimeSharing
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.pool import ReplicaPool

pytestmark = pytest.mark.usefixtures("quiet")


class Card:
    """A device that has room for one server, and what happened on it."""

    def __init__(self) -> None:
        self.awake: set[str] = set()
        self.events: list[str] = []

    def wake(self, name: str) -> None:
        assert not self.awake, f"{name} wakes beside {self.awake}"
        self.awake.add(name)
        self.events.append(name)

    def sleep(self, name: str) -> None:
        self.awake.discard(name)


class Teacher(Server):
    """A server that is as unforgiving as real ones are."""

    sleeps_while_training = False

    def __init__(self, card: Card, name: str) -> None:
        super().__init__()
        self.card, self.name, self.in_flight = card, name, 0

    async def __aenter__(self):
        self.card.wake(self.name)
        await asyncio.sleep(30.0)
        return self

    async def sleep(self, *, deadline):
        assert not self.in_flight
        await asyncio.sleep(5.0)
        self.card.sleep(self.name)

    async def wake_weights(self, *, deadline):
        raise AssertionError("a teacher takes no new weights")

    async def wake(self, *, deadline):
        self.card.wake(self.name)
        await asyncio.sleep(5.0)

    async def score(self, seconds: float = 1.0):
        assert self.name in self.card.awake
        self.in_flight += 1
        try:
            await asyncio.sleep(seconds)
            assert self.name in self.card.awake
        finally:
            self.in_flight -= 1
        return self.name


def shares_time(scenario, *names: str, make=Teacher, seed: int | None = None):
    """Run `scenario(pools, card)` with a pool for each name."""

    async def run():
        card, time_sharing = Card(), GpuTimeSharing()
        pools = {
            name: ReplicaPool(name, {name: partial(make, card, name)}, time_sharing=time_sharing) for name in names
        }
        async with time_sharing, alongside(time_sharing.watch, *(pool.watch for pool in pools.values())):
            assert not card.awake
            card.events.clear()
            await scenario(pools, card)

    run_shuffled(run(), seed)


def scored(ordinal: int) -> LeaseRequest:
    return LeaseRequest("score", (ordinal,))


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    asked=st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.0, 60.0), st.floats(0.01, 9.0), st.booleans()), max_size=40
    ),
    seed=st.integers(0, 9),
)
def test_every_request_is_answered_by_a_server_that_is_awake_alone(asked, seed):
    answered: list[str] = []

    async def scenario(pools, card):
        async def one(ordinal, name, at_s, takes_s, gives_up):
            await asyncio.sleep(at_s)
            try:
                async with asyncio.timeout(7.0 if gives_up else None):
                    reply = await ask(pools[name], lambda each: each.score(takes_s), request=scored(ordinal))
                answered.append(reply)
            except TimeoutError:
                answered.append("gave up")

        async with asyncio.TaskGroup() as group:
            for ordinal, each in enumerate(asked):
                group.create_task(one(ordinal, *each))
        assert {await ask(pool, lambda each: each.score()) for pool in pools.values()} == set("abc")

    shares_time(scenario, *"abc", seed=seed)
    assert len(answered) == len(asked)
    kept = Counter(name for name, *_, gives_up in asked if not gives_up)
    assert all(answered.count(name) >= kept[name] for name in kept)


def test_a_shift_serves_all_that_wait_for_it_and_ends_although_more_requests_come():
    async def scenario(pools, card):
        are_served = asyncio.Event()

        async def busy(ordinal):  # math always has requests
            while not are_served.is_set():
                await ask(pools["math"], lambda each: each.score(3.0), request=scored(ordinal))

        async with asyncio.TaskGroup() as group:
            for ordinal in range(100, 108):
                group.create_task(busy(ordinal))
            await asyncio.sleep(20.0)
            code = [ask(pools["code"], lambda each: each.score(), request=scored(ordinal)) for ordinal in range(8)]
            assert await asyncio.gather(*code) == ["code"] * 8
            are_served.set()
        assert card.events == ["math", "code", "math"]

    shares_time(scenario, "math", "code")


def test_the_next_shift_is_that_of_the_oldest_prompt_that_waits():
    async def scenario(pools, card):
        async with asyncio.TaskGroup() as group:
            for name, ordinal in (("a", 0), ("b", 7), ("c", 3), ("b", 9), ("c", 8)):
                group.create_task(ask(pools[name], lambda each: each.score(), request=scored(ordinal)))
                await asyncio.sleep(0.1)
        assert card.events == ["a", "c", "b"]

    shares_time(scenario, *"abc")


def test_none_is_awake_while_the_trainer_trains_and_whoever_is_asked_wakes_afterwards():
    class Sharing(Teacher):
        sleeps_while_training = True

    async def scenario(pools, card):
        time_sharing = pools["math"].time_sharing
        assert time_sharing.sleeps_while_training
        for _ in range(3):
            await ask(pools["math"], lambda each: each.score())
            sleeping = SleepingServers([time_sharing], timeout_s=60.0)
            await sleeping.sleep()
            assert not card.awake
            waiting = asyncio.create_task(ask(pools["code"], lambda each: each.score()))
            await asyncio.sleep(100.0)
            assert not card.awake
            async with sleeping.updated():
                pass
            assert await waiting == "code"
        assert card.events == ["math", "code"] * 3

    shares_time(scenario, "math", "code", make=Sharing)


def test_servers_are_kept_awake_for_whoever_asks_each_of_them_itself():
    async def scenario(pools, card):
        async def look(name):
            async with pools[name].answering():
                (server,) = pools[name].backends.values()
                assert await server.score(8.0) == name

        async with asyncio.TaskGroup() as group:
            for name in ("math", "code", "math"):
                group.create_task(look(name))
        assert sorted(card.events) == ["code", "math"]

    shares_time(scenario, "math", "code")


def test_a_server_that_does_not_sleep_ends_the_run_with_what_it_said():
    class Sleepless(Teacher):
        async def sleep(self, *, deadline):
            if self.card.events:
                raise PermanentError("not in this mode")
            await super().sleep(deadline=deadline)

    async def scenario(pools, card):
        await ask(pools["math"], lambda each: each.score())
        await ask(pools["code"], lambda each: each.score())

    class First(Sleepless):
        async def __aenter__(self):
            await super().__aenter__()
            self.card.events.clear()
            return self

    with pytest.raises(ExceptionGroup) as stopped:
        shares_time(scenario, "math", "code", make=First)
    assert [str(error) for error in leaves(stopped.value)] == ["not in this mode"]


def test_requests_that_fail_or_are_cancelled_on_their_way_end_no_shift_too_early():
    rng = random.Random(5)

    async def scenario(pools, card):
        async def one(ordinal):
            task = asyncio.create_task(
                ask(
                    pools[rng.choice(("math", "code"))],
                    lambda each: each.score(rng.random()),
                    request=scored(ordinal),
                )
            )
            await asyncio.sleep(rng.random() * 3)
            if rng.random() < 0.5:
                task.cancel()
            await asyncio.wait([task])

        async with asyncio.TaskGroup() as group:
            for ordinal in range(200):
                group.create_task(one(ordinal))
        time_sharing = pools["math"].time_sharing
        assert (time_sharing._in_flight, time_sharing._asking) == (0, [])

    shares_time(scenario, "math", "code", seed=5)
