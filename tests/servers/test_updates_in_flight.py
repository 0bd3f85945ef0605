"""Twenty weight updates of a real server under a load of long rollouts, through a pool and stages as in a run.

For every token its version and its log-probability are checked: the version that its span names, and the
log-probability that a plain forward over the whole sequence gives with those weights. So nothing of other weights may
be left in a cache. Nothing may be lost either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyModels
from parity import PARITY_NATS, Dense, decisions, own, soon
from server_process import RunningServer

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.base.retry import RetryPolicy
from spot_async.base.tasks import both, watched
from spot_async.base.timeouts import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.stage import Stage
from spot_async.tools.conformance.checks import A_LITTLE
from spot_async.types import FloatArray, Generation, IntArray, SamplingSettings, WeightSnapshot, WeightVersion

UPDATES = 20
ROLLOUTS = 8  # in flight, always
TOKENS = 600
BETWEEN = 6  # tokens that others sample between two updates
BEYOND_SHARE = 1e-4  # of positions, by which rounding in float32 alone takes them a little beyond the bound
VOCAB = 512
RESPONSE = np.random.default_rng(1).integers(3, VOCAB, 40).astype(np.int32)
POSITIONS = np.arange(0, 40, 5, dtype=np.int32)
CANDIDATES = np.arange(32, dtype=np.int32).reshape(8, 4)

KINDS = {"vllm": VllmBackend, "sglang": SglangBackend}


def prompt_of(number: int) -> IntArray:
    return np.random.default_rng(number).integers(3, 480, 20 + number % 60).astype(np.int32)


def sampling(max_tokens: int, seed: int) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=(), seed=seed)


class Load:
    """What is asked of the student while its weights change."""

    def __init__(self, pool: ReplicaPool[Any]) -> None:
        def stage(name: str) -> Stage[Any]:
            return Stage(
                name,
                pool,
                concurrency=ROLLOUTS + 1,
                timeout_s=300.0,
                retry=RetryPolicy(8),
                mailbox_capacity=ROLLOUTS + 1,
                jitter=lambda: 0.5,
                longest_standstill_s=WEIGHT_UPDATE_TIMEOUT_S,
            )

        self._rollout, self._candidates = stage("rollout"), stage("candidates")
        self.asked = 0
        self.replies: list[tuple[IntArray, Generation]] = []
        self.candidates: list[FloatArray] = []
        self.is_over = False

    async def generate(self, max_tokens: int) -> None:
        number = self.asked
        self.asked += 1
        prompt = prompt_of(number)
        reply = await self._rollout.ask(
            (number,),
            lambda student, deadline: student.generate(prompt, sampling(max_tokens, number), deadline=deadline),
        )
        assert len(reply.token_ids) == max_tokens
        self.replies.append((prompt, reply))

    async def roll_out(self, first_tokens: int) -> None:
        await self.generate(first_tokens)
        while not self.is_over:
            await self.generate(TOKENS)

    async def score_candidates(self) -> None:
        self.candidates.append(
            await self._candidates.ask(
                (0,),
                lambda student, deadline: student.candidate_logprobs(
                    prompt_of(0),
                    RESPONSE,
                    POSITIONS,
                    CANDIDATES,
                    temperature=1.0,
                    expected_version=None,
                    deadline=deadline,
                ),
            )
        )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_no_token_of_twenty_updates_is_lost_or_of_other_weights_than_it_names(
    kind: str, request: pytest.FixtureRequest, models: TinyModels, tmp_path: Path, dense_logprobs: Dense
) -> None:
    server: RunningServer = request.getfixturevalue(f"{kind}_student")
    held = {WeightVersion(0, step): (models.student, models.other)[step % 2] for step in range(UPDATES + 1)}
    load = await _under_load(lambda: _backend(kind, server, tmp_path), held)

    assert len(load.replies) == load.asked
    met, nats = set(), []
    for prompt, reply in load.replies:
        met |= {(before.version.step, after.version.step) for before, after in pairwise(reply.version_spans)}
        nats.append(_nats_off(prompt, reply, held, dense_logprobs))
    assert met == set(pairwise(range(UPDATES + 1)))  # each update met a response, and none met it twice
    _expect_rounding(np.concatenate(nats))

    assert len(load.candidates) == UPDATES
    _expect_rounding(np.concatenate([_of_one_model(each, models, dense_logprobs) for each in load.candidates]))


async def _under_load(make: Callable[[], Any], held: dict[WeightVersion, Path]) -> Load:
    pool: ReplicaPool[Any] = ReplicaPool("student", {"student": make}, are_ours=False)
    snapshots = [WeightSnapshot(directory=str(path), version=version) for version, path in held.items()]

    async def run() -> Load:
        assert (await pool.capabilities(deadline=soon())).in_flight_updates
        await pool.update_weights(snapshots[0], deadline=soon())
        load = Load(pool)
        async with asyncio.TaskGroup() as group:
            # They begin with unlike lengths, or all of them could end at the same moment, and an update meet none.
            for number in range(1, ROLLOUTS + 1):
                group.create_task(load.roll_out(TOKENS * number // ROLLOUTS))
            for snapshot in snapshots[1:]:
                await load.generate(BETWEEN)  # beside the others, which come as far
                await both(load.score_candidates(), pool.update_weights(snapshot, deadline=soon()))
            await load.generate(BETWEEN)
            load.is_over = True
        assert pool.replicas[0].restarts == 0
        return load

    async with pool:
        return await watched(run(), [pool.watch])


def _backend(kind: str, server: RunningServer, directory: Path) -> Any:
    backend = KINDS[kind]
    settings = backend.Settings(url=server.url)
    return backend(settings, role="student", model=str(server.model), run_directory=directory)


def _nats_off(prompt: IntArray, reply: Generation, held: dict[WeightVersion, Path], dense: Dense) -> FloatArray:
    """How far off each token's log-probability (T,) is from the weights that its span names."""
    sequence = [*prompt.tolist(), *reply.token_ids.tolist()]
    exact = np.full(len(reply.token_ids), np.nan, np.float32)
    for span in reply.version_spans:
        rows = decisions(dense(held[span.version], sequence), prompt, reply.token_ids)
        exact[span.start : span.end] = own(rows, reply.token_ids)[span.start : span.end]
    return np.abs(reply.logprobs - exact)


def _of_one_model(served: FloatArray, models: TinyModels, dense: Dense) -> FloatArray:
    """How far off a whole answer about candidates is from the model that it is nearest to."""
    prompt, off = prompt_of(0), []
    for model in (models.student, models.other):
        rows = decisions(dense(model, [*prompt.tolist(), *RESPONSE.tolist()]), prompt, RESPONSE)
        off.append(np.abs(served - np.take_along_axis(rows[POSITIONS], CANDIDATES.astype(np.int64), axis=1)).ravel())
    return min(off, key=np.max)


def _expect_rounding(nats: FloatArray) -> None:
    assert float(nats.max()) <= A_LITTLE * PARITY_NATS, f"{nats.max():.2g} nats off"
    assert float((nats > PARITY_NATS).mean()) <= BEYOND_SHARE
