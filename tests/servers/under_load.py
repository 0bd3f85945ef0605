"""A load of rollouts on a student whose weights change, through a pool and stages as in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from parity import PARITY_NATS, Dense, decisions, own, soon

from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S, RetryPolicy
from spot_async.base.tasks import both, watched
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.stage import Stage, StageLimits
from spot_async.testing.conformance.contract import A_LITTLE
from spot_async.types import (
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    ScoreRequest,
    WeightSnapshot,
    WeightVersion,
)

ROLLOUTS = 8  # in flight, always
BETWEEN = 6  # tokens that others sample between two updates
BEYOND_SHARE = 1e-4  # of positions, by which rounding in float32 alone takes them a little beyond the bound
VOCAB = 512
RESPONSE = np.random.default_rng(1).integers(3, VOCAB, 40).astype(np.int32)
POSITIONS = np.arange(0, 40, 5, dtype=np.int32)
CANDIDATES = np.arange(32, dtype=np.int32).reshape(8, 4)


def prompt_of(number: int) -> IntArray:
    return np.random.default_rng(number).integers(3, 480, 20 + number % 60).astype(np.int32)


def sampling(max_tokens: int, seed: int) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=(), seed=seed)


class Load:
    """What is asked of the student while its weights change."""

    def __init__(self, pool: ReplicaPool[Any], tokens: int) -> None:
        def stage(name: str) -> Stage[Any]:
            return Stage(
                name,
                pool,
                StageLimits(
                    concurrency=ROLLOUTS + 1,
                    timeout_s=300.0,
                    retry=RetryPolicy(8),
                    waiting_capacity=ROLLOUTS + 1,
                    longest_standstill_s=WEIGHT_UPDATE_TIMEOUT_S,
                ),
                jitter=lambda: 0.5,
            )

        self._rollout, self._candidates = stage("rollout"), stage("candidates")
        self._tokens = tokens  # of a rollout
        self.asked = 0
        self._ended = 0  # rollouts
        self.replies: list[tuple[IntArray, Generation]] = []
        self.candidates: list[FloatArray] = []
        self.in_flight: set[tuple[int, int]] = set()  # updates, by their steps, that surely met some rollout
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
            self._ended += 1
            await self.generate(self._tokens)

    async def sample_between(self) -> int:
        """Sample a few tokens while some rollout is in flight throughout, and so comes as far.

        On a busy machine this process may stand still for so long that all rollouts end meanwhile. Then the next update
        would meet none. Return how many rollouts had ended at the beginning.
        """
        while True:
            ended = self._ended
            await self.generate(BETWEEN)
            if self._ended - ended < ROLLOUTS:
                return ended

    async def update(self, pool: ReplicaPool[Any], snapshot: WeightSnapshot, ended: int) -> None:
        """Update the weights, and note whether some rollout was in flight all along since `ended` had ended."""
        await both(self.score_candidates(), pool.update_weights(snapshot, deadline=soon()))
        if self._ended - ended < ROLLOUTS:
            self.in_flight.add((snapshot.version.step - 1, snapshot.version.step))

    async def score_candidates(self) -> None:
        self.candidates.append(
            await self._candidates.ask(
                (0,),
                lambda student, deadline: student.candidate_logprobs(
                    ScoreRequest(prompt_of(0), RESPONSE, 1.0, deadline), POSITIONS, CANDIDATES, expected_version=None
                ),
            )
        )


async def under_load(make: Callable[[], Any], held: dict[WeightVersion, Path], tokens: int) -> Load:
    """Update a student to each of the weights in turn, under a load of rollouts of so many tokens; return the load."""
    pool: ReplicaPool[Any] = ReplicaPool("student", {"student": make}, are_ours=False)
    snapshots = [WeightSnapshot(directory=str(path), version=version) for version, path in held.items()]

    async def run() -> Load:
        assert (await pool.capabilities(deadline=soon())).in_flight_updates
        await pool.update_weights(snapshots[0], deadline=soon())
        load = Load(pool, tokens)
        async with asyncio.TaskGroup() as group:
            # They begin with unlike lengths, or all of them could end at the same moment, and an update meet none.
            for number in range(1, ROLLOUTS + 1):
                group.create_task(load.roll_out(tokens * number // ROLLOUTS))
            # As long as the shortest of them: at its end the server has begun the others too, and a first update that
            # came sooner might meet none.
            await load.generate(tokens // ROLLOUTS)
            for snapshot in snapshots[1:]:
                await load.update(pool, snapshot, await load.sample_between())
            await load.generate(BETWEEN)
            load.is_over = True
        assert pool.replicas[0].restarts == 0
        return load

    async with pool:
        return await watched(run(), [pool.watch])


def nats_off_spans(prompt: IntArray, reply: Generation, held: dict[WeightVersion, Path], dense: Dense) -> FloatArray:
    """How far off each token's log-probability (T,) is from the weights that its span names."""
    sequence = [*prompt.tolist(), *reply.token_ids.tolist()]
    exact = np.full(len(reply.token_ids), np.nan, np.float32)
    for span in reply.version_spans:
        rows = decisions(dense(held[span.version], sequence), prompt, reply.token_ids)
        exact[span.start : span.end] = own(rows, reply.token_ids)[span.start : span.end]
    return np.abs(reply.logprobs - exact)


def expect_rounding(nats: FloatArray) -> None:
    assert float(nats.max()) <= A_LITTLE * PARITY_NATS, f"{nats.max():.2g} nats off"
    assert float((nats > PARITY_NATS).mean()) <= BEYOND_SHARE
