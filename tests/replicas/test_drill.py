"""Two local student servers under real signals, in one run: one is stopped and goes on later, the other is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from spot_async.base.concurrency import gather, watched
from spot_async.config import ModelConfig, SamplingConfig, ServingConfig, StagesConfig
from spot_async.loop.orchestrator import Orchestrator, OrchestratorSettings
from spot_async.models.vocabulary import Vocabulary
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.running.servers import backend_factories
from spot_async.stages.stages import Services, Stages
from spot_async.testing.services import SimulatedVerifier
from spot_async.types import (
    PolicyNeeds,
    Problem,
    Prompt,
    Sample,
    Supervision,
    TrainReport,
    WeightSnapshot,
    WeightVersion,
)

BATCH = 6
TIMEOUT_S = 120.0


class Probing:
    """A rollout, then probes and candidate log-probabilities at once."""

    needs = PolicyNeeds(probes_per_prompt=2)

    async def supervise(self, prompt, stages):
        rollout = await stages.rollout()
        version = rollout.version_spans[0].version
        positions, candidates = np.array([0], np.int32), np.array([[3, 4]], np.int32)
        await gather(
            [
                *(stages.probe(rollout.token_ids, 0, 5, n=n) for n in range(2)),
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


@dataclass
class Publisher:
    """A trainer that publishes the same weights under a new version each time."""

    model: Path
    batches: list = field(default_factory=list)

    async def train(self, iteration, batch):
        await asyncio.sleep(0.2)  # leaves the processors to servers that start
        self.batches.append(list(batch))
        snapshot = WeightSnapshot(directory=str(self.model), version=WeightVersion(0, iteration + 1))
        return TrainReport(snapshot=snapshot, metrics={})


class Journal:
    dead: list

    def __init__(self):
        self.dead = []

    def iteration_finished(self, result):
        pass

    def prompt_died(self, prompt, error):
        self.dead.append(str(error))


def prompt(ordinal):
    token_ids = np.random.default_rng(ordinal).integers(2, 50, 8).astype(np.int32)
    return Prompt(ordinal=ordinal, problem=Problem(id=f"p{ordinal}", text="", answer=""), token_ids=token_ids)


def stages_over(pool, vocabulary):
    return Stages(
        Services(pool, None, pool, SimulatedVerifier()),
        StagesConfig(),
        SamplingConfig(max_response_tokens=24),
        student=vocabulary,
        teacher=vocabulary,
        run_seed=3,
        max_running_prompts=BATCH,
        max_probes_per_prompt=2,
    )


def pid_of(pool, name):
    return pool.backends[name]._server._child.pid


def living(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - looked at from outside, as a person would
            await asyncio.sleep(0.02)


async def test_a_run_outlives_a_frozen_and_a_killed_server_with_the_samples_it_would_have_had(random_model, tmp_path):
    model = random_model(seed=5)
    vocabulary = Vocabulary.load(model)
    role = ModelConfig(model=str(model), backend={"kind": "local", "replicas": 2}, serving=ServingConfig(stall_s=5.0))
    pool = ReplicaPool("student", backend_factories(role, "student", tmp_path), role.serving)
    first, second = "student-1", "student-2"
    publisher, journal = Publisher(model), Journal()
    over = False
    pids: set[int] = set()

    def prompts():
        for ordinal in count():
            if over and ordinal % BATCH == 0:
                return
            yield prompt(ordinal)

    def states():
        return {each.name: each.state for each in pool.replicas}

    async def drill():
        nonlocal over
        await until(lambda: len(publisher.batches) >= 2)
        pids.update(pid_of(pool, name) for name in (first, second))
        os.kill(pid_of(pool, first), signal.SIGSTOP)
        await until(lambda: states()[first] is State.RECOVERING)
        os.kill(pid_of(pool, first), signal.SIGCONT)
        await until(lambda: states()[first] is State.SERVING)
        os.kill(pid_of(pool, second), signal.SIGKILL)
        trained = len(publisher.batches)
        await until(lambda: len(publisher.batches) > trained)  # on the other one alone
        await until(lambda: states()[second] is State.SERVING and pool.replicas[1].restarts == 1)
        pids.add(pid_of(pool, second))
        over = True

    async with pool:
        orchestrator = Orchestrator(
            OrchestratorSettings(
                iterations=10_000,
                batch_size=BATCH,
                max_staleness=0,
                capacity_prompts=BATCH,
                capacity_bytes=1 << 30,
                max_response_tokens=24,
                weight_update_timeout_s=TIMEOUT_S,
                vocab_size=50,
                max_dead_share=0.1,
            ),
            prompts=prompts(),
            policy=Probing(),
            stages=stages_over(pool, vocabulary),
            trainer=publisher,
            weight_sinks=[pool],
            observer=journal,
        )
        await watched(_both(orchestrator.run(), drill()), [pool.watch])
        assert [each.restarts for each in pool.replicas] == [0, 1]
        assert journal.dead == []
        trained = [supervision for batch in publisher.batches for supervision in batch]
        assert [each.prompt_ordinal for each in trained] == list(range(len(trained)))
        assert [each.version.step for each in trained] == [i // BATCH for i in range(len(trained))]
        # The weights never changed, and bits depend on nothing but the request: asked again, in peace, it is the same.
        again = stages_over(pool, vocabulary)
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
