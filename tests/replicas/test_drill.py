"""Two local student servers under real signals, in one run: one is stopped and continues later, the other is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from simulated_replicas import Probing

from spot_async.base.tasks import watched
from spot_async.config import ModelConfig, SamplingConfig, ServingConfig
from spot_async.models.vocabulary import Vocabulary
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.running.services import backend_factories
from spot_async.testing.services import SimulatedTrainer
from spot_async.testing.simulation import make_run
from spot_async.types import Problem, Prompt

BATCH = 6
TIMEOUT_S = 120.0


def prompt(ordinal):
    token_ids = np.random.default_rng(ordinal).integers(2, 50, 8).astype(np.int32)
    return Prompt(ordinal=ordinal, problem=Problem(id=f"p{ordinal}", text="", answer=""), token_ids=token_ids)


def made(pool, model, prompts=()):
    return make_run(
        Probing(),
        student=pool,
        trainer=SimulatedTrainer(step_s=0.2, directory=str(model)),  # leaves the processors to servers that start
        prompts=prompts,
        vocabulary=Vocabulary.load(model),
        sampling=SamplingConfig(max_response_tokens=24),
        seed=3,
        iterations=10_000,
        batch_size=BATCH,
        vocab_size=50,
        weight_update_timeout_s=TIMEOUT_S,
    )


def pid_of(pool, name):
    return pool.backends[name]._server._launched._child.pid


def living(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - looked at from outside, as a person would
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_a_run_outlives_a_frozen_and_a_killed_server_with_the_samples_it_would_have_had(random_model, tmp_path):
    model = random_model(seed=5)
    role = ModelConfig(model=str(model), backend={"kind": "local", "replicas": 2}, serving=ServingConfig(stall_s=5.0))
    pool = ReplicaPool("student", backend_factories(role, "student", tmp_path), role.serving)
    first, second = "student-1", "student-2"
    over = False
    pids: set[int] = set()

    def prompts():
        for ordinal in count():
            if over and ordinal % BATCH == 0:
                return
            yield prompt(ordinal)

    run = made(pool, model, prompts())

    def states():
        return {each.name: each.state for each in pool.replicas}

    async def drill():
        nonlocal over
        await until(lambda: len(run.batches) >= 2)
        pids.update(pid_of(pool, name) for name in (first, second))
        os.kill(pid_of(pool, first), signal.SIGSTOP)
        await until(lambda: states()[first] is State.RECOVERING)
        os.kill(pid_of(pool, first), signal.SIGCONT)
        await until(lambda: states()[first] is State.SERVING)
        os.kill(pid_of(pool, second), signal.SIGKILL)
        trained = len(run.batches)
        await until(lambda: len(run.batches) > trained)  # on the other one alone
        await until(lambda: states()[second] is State.SERVING and pool.replicas[1].restarts == 1)
        pids.add(pid_of(pool, second))
        over = True

    async with pool:
        await watched(_both(run.orchestrator.run(), drill()), [pool.watch])
        assert [each.restarts for each in pool.replicas] == [0, 1]
        assert not run.journal.dead
        trained = run.trained
        assert [each.prompt_ordinal for each in trained] == list(range(len(trained)))
        assert [each.version.step for each in trained] == [i // BATCH for i in range(len(trained))]
        # The weights never changed, and bits depend on nothing but the request: asked again, in peace, it is the same.
        again = made(pool, model).stages
        for supervision in trained[:: len(trained) // 12]:
            rollout = await again.for_prompt(prompt(supervision.prompt_ordinal)).rollout()
            assert rollout.token_ids.tobytes() == supervision.response_ids.tobytes()
            assert rollout.logprobs.tobytes() == supervision.behavior_logprobs.tobytes()
    assert len(pids) == 3
    assert not living(pids)


async def _both(run, drill):
    async with asyncio.TaskGroup() as group:
        group.create_task(run)
        group.create_task(drill)
