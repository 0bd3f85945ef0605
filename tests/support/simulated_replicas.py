"""Runs a training over simulated replicas on virtual time, with faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from faults.servers import Rates, SimulatedReplica, SimulatedServer
from limits import same_limits
from ready_order import run_shuffled

from spot_async.base.tasks import gather, watched
from spot_async.config import ServingConfig
from spot_async.replicas.pool import ReplicaPool
from spot_async.testing.simulation import make_run, simulated_prompts
from spot_async.types import PolicyNeeds, Sample, Supervision

BATCH, ITERATIONS = 8, 4
SLOW = Rates(tokens_per_s=200.0, tokens_per_s_each=20.0)


class Probing:
    """A policy with SPOT's requests and without its arithmetic: a rollout, then probes and candidates at once."""

    needs = PolicyNeeds(probes_per_prompt=3)

    async def supervise(self, prompt, stages):
        rollout = await stages.rollout()
        version = rollout.version_spans[0].version
        positions, candidates = np.array([0], np.int32), np.array([[3, 4]], np.int32)
        await gather(
            [
                *(stages.probe(rollout.token_ids, 0, 5, n=n) for n in range(3)),
                stages.candidate_logprobs(rollout.token_ids, positions, candidates, version=version),
            ]
        )
        supervision = Supervision(
            prompt_ordinal=prompt.ordinal,
            problem_id=prompt.problem.id,
            prompt_ids=prompt.token_ids,
            response_ids=rollout.token_ids,
            behavior_logprobs=rollout.logprobs,
            version=version,
        )
        return [Sample(supervision=supervision, metrics={}, record={})]


def pool_of_servers(servers, *, are_ours=True, make=SimulatedReplica, **serving):
    numbers = ServingConfig(**{"stall_s": 5.0, "restarts": 100, **serving})
    factories = {server.name: (lambda server=server: make(server)) for server in servers}
    return ReplicaPool("student", factories, numbers, are_ours=are_ours)


@dataclass(repr=False)  # asyncio.Runner writes what it returns into the message of an error that it drops
class Outcome:
    batches: list
    dead: dict
    seconds: float


def train(servers, trouble, *, max_dead_share=0.1, listener=None, trainer=None, ready_order=None, **settings):
    """Run over a pool of `servers`, with `trouble(servers)` as a task beside it. `listener` is told of all events."""

    async def scenario():
        pool = pool_of_servers(servers, **settings)
        training = make_run(
            Probing(),
            student=pool,
            trainer=trainer,
            prompts=simulated_prompts(problems=1),
            limits=same_limits(timeout_s=60.0),
            iterations=ITERATIONS,
            batch_size=BATCH,
            weight_update_timeout_s=600.0,
            max_dead_share=max_dead_share,
        )
        orchestrator = training.orchestrator
        if listener is not None:
            orchestrator.stages.events.subscribe(listener)

        async def run():
            async with asyncio.TaskGroup() as group:
                beside = group.create_task(trouble(servers))
                await orchestrator.run()
                beside.cancel()

        async with pool:
            await watched(run(), [pool.watch])
            assert [each.in_flight for each in pool.replicas] == [0] * len(servers)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not any(server.is_running for server in servers)
        return Outcome(training.batches, training.journal.dead, asyncio.get_running_loop().time())

    return run_shuffled(scenario(), ready_order)


def servers(number, **settings):
    return [SimulatedServer(f"student-{i}", SLOW, **settings) for i in range(1, number + 1)]


def at_random(rng):
    """Return trouble at random: kills, freezes, missed weights and storms of refusals, as long as the run lasts."""

    async def trouble(servers):
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(rng.expovariate(1 / 10))
            server = rng.choice(servers)
            match rng.choice(["kill", "freeze", "miss", "storm"]):
                case "kill":
                    server.kill()
                case "freeze" if server.is_running:
                    server.freeze()
                    loop.call_later(rng.choice([1.0, 8.0, 15.0, 40.0, 200.0]), server.thaw)
                case "miss":
                    server.misses = 1
                case "storm":
                    server.most_in_flight = rng.choice([0, 1, 3])
                    loop.call_later(rng.choice([2.0, 10.0, 30.0]), setattr, server, "most_in_flight", None)

    return trouble
