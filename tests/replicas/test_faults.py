"""A training run over simulated replicas that die, freeze, throttle and miss weights, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path

import msgspec
import pytest
from faults.servers import Rates, SimulatedReplica, SimulatedServer, SimulatedTeacherReplica
from limits import same_limits
from only_teacher import only
from ready_order import run_shuffled
from simulated_replicas import BATCH, ITERATIONS, SLOW, at_random, pool_of_servers, servers, train

from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import gather, leaves, watched
from spot_async.config import ServingConfig
from spot_async.errors import FarSideError, ProcessDiedError, SpotError, TransientError
from spot_async.models.weight_files import delete_weights
from spot_async.policies.opd import OpdPolicy
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.stage import Stage, StageLimits
from spot_async.testing.services import SimulatedTrainer
from spot_async.testing.simulation import make_policy, make_run
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import WeightSnapshot, WeightVersion

pytestmark = pytest.mark.usefixtures("quiet")


def assert_trained_once_with_the_right_weights(outcome):
    assert outcome.dead == {}
    ordinals = [[each.prompt_ordinal for each in batch] for batch in outcome.batches]
    assert ordinals == [list(range(i * BATCH, (i + 1) * BATCH)) for i in range(ITERATIONS)]
    for step, batch in enumerate(outcome.batches):
        assert {each.version for each in batch} == {WeightVersion(0, step)}


@pytest.mark.parametrize("are_ours", [True, False])
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(each, marks=pytest.mark.long) for each in range(8, 20))])
def test_every_prompt_is_trained_once_whatever_befalls_the_servers(seed, are_ours):
    """Deadlocks are errors on virtual time. Tasks that are ready together continue in an order of the seed's."""
    outcome = train(
        servers(2 + seed % 2),
        at_random(random.Random(seed)),
        are_ours=are_ours,
        recovery_timeout_s=3000.0,
        ready_order=seed,
    )
    assert_trained_once_with_the_right_weights(outcome)


class UnreliableTeacher(SimulatedTeacherReplica):
    """It fails 14 % of the requests, and never answers 2.4 %."""

    async def _work(self, tokens, rng):
        draw = self.server.luck.random()
        if draw < 0.164:
            self.server.reply_faults.append(
                "never" if draw < 0.024 else ("server error", "reset")[int(1000 * draw) % 2]
            )
        await super()._work(tokens, rng)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_replies_that_fail_or_never_come_cost_no_prompt_and_leave_the_limit_as_it_is(seed):
    """With one deadline for all attempts, those that never came had one attempt, and the next ones the only place."""

    async def scenario():
        names = [f"teacher-{seed}-{i}" for i in range(2)]
        servers = {name: SimulatedServer(name, Rates(start_s=0.5)) for name in names}
        factories = {name: (lambda server=server: UnreliableTeacher(server)) for name, server in servers.items()}
        pool = ReplicaPool("teacher", factories, ServingConfig(stall_s=30.0, restarts=1000))
        run = make_run(
            make_policy(OpdPolicy),
            teachers=only(pool),
            limits=same_limits(timeout_s=60.0, attempt_timeout_s=2.0),
            iterations=100,
            batch_size=16,
        )
        limits = []

        async def kill_each_minute():
            for name in itertools.cycle(names):
                await asyncio.sleep(60.0)
                servers[name].kill()

        async def train():
            async with asyncio.TaskGroup() as group:
                beside = group.create_task(kill_each_minute())
                await run.orchestrator.run()
                beside.cancel()

        class Watching:
            def on(self, event):
                limits.extend(each.limit for each in pool.replicas)

        run.stages.events.subscribe(Watching())
        async with pool:
            await watched(train(), [pool.watch])
        return run, min(limits)

    run, lowest = run_shuffled(scenario(), seed)
    assert run.journal.dead == {}
    assert len(run.batches) == 100
    assert lowest > 16


def test_a_frozen_server_is_noticed_before_its_requests_have_used_up_their_attempts():
    async def scenario():
        server = SimulatedServer("student-1", SLOW)
        stage = Stage(
            "probe",
            pool_of_servers([server], stall_s=60.0),
            StageLimits(
                concurrency=8, timeout_s=60.0, attempt_timeout_s=2.0, retry=RetryPolicy(attempts=3), waiting_capacity=8
            ),
            jitter=lambda: 0.5,
        )

        async def thaw_later():
            await asyncio.sleep(45.0)
            server.thaw()

        async def work():
            server.freeze()
            async with asyncio.TaskGroup() as group:
                group.create_task(thaw_later())
                asked = [stage.ask((i,), lambda each, deadline: each._work(1, None)) for i in range(3)]
                await gather(asked)

        async with stage.pool as pool:
            await watched(work(), [pool.watch])
        return server.starts

    assert run_on_virtual_time(scenario()) == 1  # it answers again, and was not started anew


def test_a_request_whose_connection_breaks_each_time_does_not_restart_a_server_that_answers():
    """Failures in a row, and a trial after them, say something of a server only if they are of different requests."""

    async def scenario():
        server = SimulatedServer("student-1", SLOW)
        stage = Stage(
            "probe",
            pool_of_servers([server]),
            StageLimits(concurrency=8, timeout_s=60.0, retry=RetryPolicy(attempts=8), waiting_capacity=8),
            jitter=lambda: 0.5,
        )

        async def broken(backend, deadline):
            raise TransientError("connection reset")

        async def work():
            for prompts in (1, 2):
                asked = [stage.ask((i,), broken) for i in range(prompts)]
                await asyncio.gather(*asked, return_exceptions=True)
                starts.append(server.starts)

        starts = []
        async with stage.pool as pool:
            await watched(work(), [pool.watch])
        return starts

    one, two = run_on_virtual_time(scenario())
    assert one == 1
    assert two > 1


async def nothing(servers):
    await asyncio.Event().wait()


def kill_every(seconds):
    async def kill(servers):
        while True:
            await asyncio.sleep(seconds)
            servers[0].kill()

    return kill


async def kill_the_last_once(servers):
    await asyncio.sleep(6.0)
    servers[-1].kill()
    await asyncio.Event().wait()


def test_a_lone_server_that_is_killed_comes_back_with_the_newest_weights():
    async def kill_twice(servers):
        for moment in (4.0, 14.0):
            await asyncio.sleep(moment)
            servers[0].kill()
        await asyncio.Event().wait()

    (server,) = servers(1)
    assert_trained_once_with_the_right_weights(train([server], kill_twice))
    assert server.starts == 3


def test_a_frozen_server_that_thaws_goes_on_without_being_started_again():
    async def freeze(servers):
        await asyncio.sleep(6.0)
        servers[0].freeze()
        await asyncio.sleep(12.5)  # 5 s until it is asked, 5 s until that fails, thawed within the next 5 s
        servers[0].thaw()
        await asyncio.Event().wait()

    both = servers(2)
    outcome = train(both, freeze)
    assert_trained_once_with_the_right_weights(outcome)
    assert [server.starts for server in both] == [1, 1]
    frozen = servers(2)
    assert train(frozen, freeze, stall_s=1.0).seconds < outcome.seconds
    assert [server.starts for server in frozen] == [2, 1]


def test_a_server_without_restarts_left_ends_the_run_as_its_end_would_have():
    with pytest.raises(BaseExceptionGroup) as stopped:
        train(servers(1), kill_every(8.0), restarts=1)
    (error,) = [each for each in leaves(stopped.value) if isinstance(each, ProcessDiedError)]
    assert "student-1 was killed by SIGKILL" in str(error)
    assert "started again 1 times" in error.__notes__[0]


def test_a_server_that_is_started_too_often_is_left_out_where_others_serve():
    both = servers(2)
    assert_trained_once_with_the_right_weights(train(both, kill_every(6.0), restarts=1))
    assert [server.starts for server in both] == [2, 1]


def test_a_machine_that_is_out_of_reach_for_a_while_costs_its_server_no_restarts():
    class Away(SimulatedReplica):
        async def __aenter__(self):
            if 6.0 < asyncio.get_running_loop().time() < 200.0:
                raise FarSideError(f"{self.server.name}: no route to node2")
            return await super().__aenter__()

    (server,) = servers(1)
    settings = {"make": Away, "restarts": 1}
    outcome = train([server], kill_the_last_once, recovery_timeout_s=300.0, **settings)
    assert_trained_once_with_the_right_weights(outcome)
    assert server.starts == 2
    with pytest.raises(BaseExceptionGroup) as stopped:
        train(servers(1), kill_the_last_once, recovery_timeout_s=100.0, **settings)
    (error,) = {str(each) for each in leaves(stopped.value) if type(each) is SpotError}
    assert "no server for 100 s (student-1: recovering, student-1: no route to node2)" in error


def test_endpoints_that_stay_away_end_the_run_with_their_name_and_last_error():
    class Gone(SimulatedReplica):
        async def __aenter__(self):
            if self.server.starts:
                raise TransientError(f"{self.server.name}: connection refused")
            return await super().__aenter__()

    async def kill(servers):
        await asyncio.sleep(7.0)
        for server in servers:
            server.kill()
        await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as stopped:
        train(servers(2), kill, are_ours=False, make=Gone, recovery_timeout_s=50.0)
    (error,) = {str(each) for each in leaves(stopped.value) if type(each) is SpotError}
    assert error.startswith("student: no server for 50 s (student-1: recovering, student-1: connection refused; ")
    assert "student.serving.recovery_timeout_s" in error


def test_a_server_that_came_back_under_another_version_gets_nothing_until_it_has_the_weights():
    """One misses an update, answers nothing meanwhile, and is told again before anything is sent to it."""
    seen = []

    class Watchful(SimulatedReplica):
        async def generate(self, *args, **more):
            seen.append(self.version)
            return await super().generate(*args, **more)

    async def miss(servers):
        servers[1].misses = 2
        await asyncio.Event().wait()

    outcome = train(servers(2), miss, make=Watchful)
    assert_trained_once_with_the_right_weights(outcome)
    assert seen == sorted(seen)


def test_weights_that_a_returning_server_loads_are_not_pruned_under_it(tmp_path):
    class Pruning(SimulatedTrainer):
        """Keeps the newest two, as the trainer does by default."""

        async def train(self, iteration, batch):
            report = await super().train(iteration, batch)
            directory = tmp_path / f"step-{iteration + 1}"
            directory.mkdir()
            for old in sorted(tmp_path.iterdir())[:-2]:
                delete_weights(old)
            return msgspec.structs.replace(
                report, snapshot=msgspec.structs.replace(report.snapshot, directory=str(directory))
            )

    lost, loaded = [], []

    class Loading(SimulatedReplica):
        """The second server takes long over new weights."""

        async def update_weights(self, snapshot, *, deadline):
            seconds = 20 if self.server.name == "student-2" else 1
            for _ in range(seconds):
                await asyncio.sleep(1.0)
                lost.extend({snapshot.directory} - set(map(str, tmp_path.iterdir())))
            await super().update_weights(snapshot, deadline=deadline)
            loaded.append((self.server.name, snapshot.version.step))

    both = servers(2)
    outcome = train(both, kill_the_last_once, make=Loading, trainer=Pruning())
    assert_trained_once_with_the_right_weights(outcome)
    assert both[1].starts == 2
    assert lost == []
    assert ("student-2", 1) in loaded[3:]  # when the other had those of two steps later


@pytest.mark.parametrize("number", [1, 2])
def test_a_server_that_ends_in_its_sleep_is_not_brought_back_until_it_is_to_wake(number):
    class Sleeping(SimulatedReplica):
        sleeps_while_training = True

        async def sleep(self, *, deadline):
            self.server.connect()

        wake = sleep

    async def scenario():
        machines = servers(number)
        pool = pool_of_servers(machines, make=Sleeping)
        loop = asyncio.get_running_loop()

        async def run():
            await pool.sleep(deadline=loop.time() + 60.0)
            machines[0].kill()
            await asyncio.sleep(50.0)
            assert machines[0].starts == 1
            await pool.wake(deadline=loop.time() + 60.0)
            snapshot = WeightSnapshot(directory="w", version=WeightVersion(0, 1))
            await pool.update_weights(snapshot, deadline=loop.time() + 60.0)
            await asyncio.sleep(20.0)
            assert {each.state for each in pool.replicas} == {State.SERVING}
            assert {server.version for server in machines} == {snapshot.version}

        async with pool:
            assert pool.sleeps_while_training
            await watched(run(), [pool.watch])

    run_on_virtual_time(scenario())


def replay(load, number):
    """Generated tokens a second of recorded prompts, `number` replicas at the stated rates."""

    async def scenario():
        machines = [SimulatedServer(f"student-{i}") for i in range(1, number + 1)]
        pool = pool_of_servers(machines)

        def stage(name, concurrency):
            retry = RetryPolicy(attempts=8)
            return Stage(
                name,
                pool,
                StageLimits(concurrency=concurrency, timeout_s=600.0, retry=retry, waiting_capacity=10_000),
                jitter=lambda: 0.5,
            )

        rollouts, probes = stage("rollout", 64), stage("probe", 256)

        async def generate(stage, priority, session, tokens):
            await stage.ask(
                priority,
                lambda replica, deadline: replica.server.processor.do(tokens),
                session=session,
                work=lambda _: tokens,
            )

        async def prompt(ordinal, rollout, branches):
            session = f"prompt-{ordinal}"
            await generate(rollouts, (ordinal,), session, rollout)
            await gather(generate(probes, (ordinal, i), session, tokens) for i, tokens in enumerate(branches))

        async with pool:
            started_s = asyncio.get_running_loop().time()
            await gather(prompt(i, rollout, branches) for i, (rollout, branches) in enumerate(load))
            seconds = asyncio.get_running_loop().time() - started_s
        return sum(rollout + sum(branches) for rollout, branches in load) / seconds

    return run_on_virtual_time(scenario())


def test_two_replicas_give_nearly_twice_the_throughput_of_one_on_a_recorded_load():
    """Response lengths of a run of the quickstart, all of a prompt at one replica, at most 2000 tokens/s of each."""
    load = json.loads((Path(__file__).parents[1] / "recorded" / "recorded_load.json").read_text())["prompts"]
    one, two = replay(load, 1), replay(load, 2)
    assert one > 0.95 * 2000.0
    assert two >= 1.9 * one
    assert replay(load + load, 2) >= 1.9 * one  # nor does it fall off in the long run
