"""Runs a role's pool over servers in this process, for tests of one incident at one server."""

from __future__ import annotations

import asyncio

from ready_order import run_shuffled

from spot_async.base.tasks import watched
from spot_async.config import ServingConfig
from spot_async.errors import DeadlineExceededError, ProcessDiedError, RequestError
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.pool import ReplicaPool
from spot_async.testing.services import capabilities
from spot_async.types import WeightSnapshot, WeightVersion

OFFERS = capabilities(8)


class Server:
    """A backend object that answers pings unless it is frozen."""

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


class SleepingServer(Server):
    """One that sleeps while the trainer trains."""

    sleeps_while_training = True

    async def sleep(self, *, deadline):
        pass

    async def wake_weights(self, *, deadline):
        pass

    async def wake(self, *, deadline):
        pass


async def update(pool):
    """Give the pool the first weights of a run. Return them."""
    snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
    await pool.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 100.0)
    return snapshot


async def ask(pool, send, *, request=None):
    """Return the answer of `send(server)` for a server that the pool leases, or the error that it fails with."""
    try:
        async with await pool.lease(request or LeaseRequest("score", (0,))) as server:
            return await send(server)
    except RequestError as error:
        return error


def incident(scenario, *, make=Server, number=1, are_ours=True, ready_order=None, **serving):
    """Run `scenario(pool, made)` beside the pool's watch. `made` has all backend objects, by the replica's number."""

    async def run():
        made = [[] for _ in range(number)]

        def factory(i):
            made[i].append(make())
            return made[i][-1]

        factories = {f"r{i}": (lambda i=i: factory(i)) for i in range(number)}
        async with ReplicaPool("teacher", factories, ServingConfig(**serving), are_ours=are_ours) as pool:
            await watched(scenario(pool, made), [pool.watch])

    run_shuffled(run(), ready_order)
