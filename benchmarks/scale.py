"""Measures the orchestrator's CPU time of a prompt, by the number of prompts in flight, on virtual time.

    python benchmarks/scale.py

A prompt makes the requests of SPOT: a rollout, its score, its verdict, candidates, eight probes and their verdicts. All
answers are there already, and a request only sleeps for a while of its own. So what is measured is the program itself:
admission, stages, pools, queue and batches. The prompts in flight are those of a strict run's batch. The pool has four
servers without a limit.

The goal is that a prompt among 10,000 costs at most 1.3 times as much as one among 100. All sizes take turns for some
rounds. The ratio is taken within each round, and its median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from typing import Any, Self

import numpy as np
from report import show, spread

from spot_async.base.processes.memory import tune_gc
from spot_async.base.tasks import gather, watched
from spot_async.config import ServingConfig
from spot_async.replicas.pool import ReplicaPool
from spot_async.testing.replies import capabilities, generation, token_scores
from spot_async.testing.services import VOCAB_SIZE
from spot_async.testing.simulation import make_run, same_limits, simulated_prompts
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Generation, PolicyNeeds, Sample, Supervision, TokenScores, Verdict, WeightVersion

IN_FLIGHT = (100, 1_000, 10_000)
PROMPTS = 10_000  # of one measurement
SERVERS, PROBES = 4, 8
GOAL = 1.3
TOKENS = np.arange(2, 10, dtype=np.int32)
SCORES = token_scores(np.zeros(len(TOKENS)))
POSITIONS, CANDIDATES = np.array([0], np.int32), np.array([[3, 4]], np.int32)


class Requests:
    """A policy with SPOT's requests and without its arithmetic."""

    needs = PolicyNeeds(teacher_top_k=1, probes_per_prompt=PROBES)

    async def supervise(self, prompt: Any, stages: Any) -> list[Sample]:
        rollout = await stages.rollout()
        await gather([stages.score(rollout.token_ids, top_k=1), stages.verify(rollout.token_ids)])
        version = rollout.version_spans[0].version
        await stages.candidate_logprobs(rollout.token_ids, POSITIONS, CANDIDATES, version=version)
        await gather(self._probe(rollout, n, stages) for n in range(PROBES))
        supervision = Supervision(
            prompt_ordinal=prompt.ordinal,
            problem_id=prompt.problem.id,
            prompt_ids=prompt.token_ids,
            response_ids=rollout.token_ids,
            behavior_logprobs=rollout.logprobs,
            version=version,
        )
        return [Sample(supervision=supervision, metrics={}, record={})]

    async def _probe(self, rollout: Generation, n: int, stages: Any) -> None:
        await stages.probe(rollout.token_ids, 0, 5, n=n)
        await stages.verify(rollout.token_ids)


class Sleeper:
    """Servers and verifier at once: every request sleeps for a second or so, and gets the same answer."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._reply = generation(TOKENS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def capabilities(self, *, deadline: float) -> Any:
        return capabilities(VOCAB_SIZE)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def update_weights(self, snapshot: Any, *, deadline: float) -> None:
        self._reply = generation(TOKENS, version=snapshot.version)

    async def generate(self, prompt_ids: Any, sampling: Any, **request: Any) -> Generation:
        await self._sleep()
        return self._reply

    async def score(self, prompt_ids: Any, response_ids: Any, **request: Any) -> TokenScores:
        await self._sleep()
        return SCORES

    async def candidate_logprobs(self, *request: Any, expected_version: WeightVersion | None, **more: Any) -> Any:
        await self._sleep()
        return np.zeros(CANDIDATES.shape, np.float32)

    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Verdict:
        await self._sleep()
        return Verdict.CORRECT

    async def _sleep(self) -> None:
        await asyncio.sleep(0.5 + self._random.random())


async def run(in_flight: int) -> None:
    servers = {f"student-{i}": Sleeper(i) for i in range(SERVERS)}
    factories = {name: (lambda server=server: server) for name, server in servers.items()}
    async with ReplicaPool("student", factories, ServingConfig(max_in_flight=PROMPTS * PROBES)) as pool:
        simulated = make_run(
            Requests(),  # type: ignore[arg-type]
            student=pool,
            teacher=Sleeper(SERVERS),  # type: ignore[arg-type]
            verifier=Sleeper(SERVERS + 1),
            prompts=simulated_prompts(PROMPTS),
            config=same_limits(concurrency=PROMPTS * PROBES, timeout_s=600.0),
            iterations=PROMPTS // in_flight,
            batch_size=in_flight,
            capacity_bytes=1 << 40,
        )
        await watched(simulated.orchestrator.run(), [pool.watch])
        assert len(simulated.trained) == PROMPTS


def cpu_us(in_flight: int) -> float:
    """Return microseconds of CPU for each prompt."""
    gc.collect()
    started = time.process_time()
    run_on_virtual_time(run(in_flight))
    return 1e6 * (time.process_time() - started) / PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a prompt by the number in flight.")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tune_gc()  # as a run does
    cpu_us(IN_FLIGHT[0])  # warms up
    found = [{in_flight: cpu_us(in_flight) for in_flight in IN_FLIGHT} for _ in range(arguments.rounds)]
    rows = [
        [
            f"{in_flight:,}",
            spread([each[in_flight] for each in found], ".0f"),
            spread([each[in_flight] / each[IN_FLIGHT[0]] for each in found]),
        ]
        for in_flight in IN_FLIGHT
    ]
    show(
        f"{PROMPTS:,} prompts of {4 + 2 * PROBES} requests",
        ["prompts in flight", "CPU us a prompt", f"x {IN_FLIGHT[0]} in flight"],
        rows,
        [f"goal: at most {GOAL} x at {IN_FLIGHT[-1]:,}"],
    )


if __name__ == "__main__":
    main()
