"""Measures the orchestrator's CPU time of a prompt, by the number of prompts in flight, on virtual time.

    python benchmarks/scale.py

A prompt makes the requests of SPOT: a rollout, its score, its verdict, candidates, eight probes and their verdicts. All
answers are there already, and a request only sleeps for a while of its own. So what is measured is the program itself:
admission, stages, pools, queue and batches. The prompts in flight are those of a strict run's batch. The pool has four
servers without a limit.

The same policy also sends its requests straight to these servers, with nothing in between. That is the cost of the
policy, the simulated servers and the event loop. The rest is the orchestrator's. The goal is that the orchestrator's
part of a prompt among 10,000 is at most 1.3 times that of one among 100. All sizes take turns for some rounds. Ratios
are taken within each round, and their medians count.

Two columns say what the growth consists of: the time of the garbage collector, and that of the kernel, which provides
the memory. What else grows is waiting for memory, since no part of the program does more for a prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Self

import numpy as np
from report import show, spread

from spot_async.base.processes.resources import tune_gc
from spot_async.base.tasks import gather, watched
from spot_async.config import ServingConfig, StagesConfig
from spot_async.replicas.pool import ReplicaPool
from spot_async.stages.services import STAGE_SERVERS, TeacherService
from spot_async.testing.services import VOCAB_SIZE, capabilities, generation, token_scores
from spot_async.testing.simulation import make_run, simulated_prompts
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
        await asyncio.sleep(self._seconds())
        return self._reply

    async def score(self, request: Any, **more: Any) -> TokenScores:
        await asyncio.sleep(self._seconds())
        return SCORES

    async def candidate_logprobs(self, *request: Any, expected_version: WeightVersion | None, **more: Any) -> Any:
        await asyncio.sleep(self._seconds())
        return np.zeros(CANDIDATES.shape, np.float32)

    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Verdict:
        await asyncio.sleep(self._seconds())
        return Verdict.CORRECT

    def _seconds(self) -> float:
        return 0.5 + self._random.random()


async def run(in_flight: int) -> None:
    """Run all prompts as a training run does."""
    servers = {f"student-{i}": Sleeper(i) for i in range(SERVERS)}
    factories = {name: (lambda server=server: server) for name, server in servers.items()}
    limits = StagesConfig.model_validate({name: {"concurrency": PROMPTS * PROBES} for name in STAGE_SERVERS})
    async with ReplicaPool("student", factories, ServingConfig(max_in_flight=PROMPTS * PROBES)) as pool:
        simulated = make_run(
            Requests(),  # type: ignore[arg-type]
            student=pool,
            teachers={"": TeacherService(server=Sleeper(SERVERS))},  # type: ignore[arg-type]
            verifier=Sleeper(SERVERS + 1),
            prompts=simulated_prompts(PROMPTS),
            limits=limits,
            iterations=PROMPTS // in_flight,
            batch_size=in_flight,
            capacity_bytes=1 << 40,
        )
        await watched(simulated.orchestrator.run(), [pool.watch])
        assert len(simulated.trained) == PROMPTS


class BareStages:
    """Sends a prompt's requests straight to the servers."""

    def __init__(self, student: Sleeper, teacher: Sleeper, verifier: Sleeper) -> None:
        self._student, self._teacher, self._verifier = student, teacher, verifier

    async def rollout(self) -> Generation:
        return await self._student.generate(None, None)

    async def score(self, response_ids: Any, *, top_k: int) -> TokenScores:
        return await self._teacher.score(None)

    async def verify(self, response_ids: Any) -> Verdict:
        return await self._verifier.verify(None, "", deadline=0.0)

    async def candidate_logprobs(self, *request: Any, version: WeightVersion) -> Any:
        return await self._student.candidate_logprobs(*request, expected_version=version)

    async def probe(self, *request: Any, n: int) -> Generation:
        return await self._student.generate(None, None)


async def run_bare(in_flight: int) -> None:
    """Run all prompts without an orchestrator."""
    policy, prompts = Requests(), simulated_prompts(PROMPTS)
    students = cycle([Sleeper(i) for i in range(SERVERS)])
    teacher, verifier = Sleeper(SERVERS), Sleeper(SERVERS + 1)
    kept = []
    for _ in range(PROMPTS // in_flight):
        batch = [BareStages(next(students), teacher, verifier) for _ in range(in_flight)]
        kept += await gather(policy.supervise(prompt, stages) for stages, prompt in zip(batch, prompts, strict=False))
    assert len(kept) == PROMPTS


@dataclass
class Cost:
    """Seconds of CPU."""

    total: float = 0.0
    kernel: float = 0.0  # of the total
    collector: float = 0.0  # of the total


@contextmanager
def counted(cost: Cost) -> Iterator[None]:
    """Count what is spent inside."""
    started = 0.0

    def collecting(phase: str, info: object) -> None:
        nonlocal started
        if phase == "start":
            started = time.process_time()
        else:
            cost.collector += time.process_time() - started

    gc.collect()
    gc.callbacks.append(collecting)
    before = resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    gc.callbacks.remove(collecting)
    cost.kernel = after.ru_stime - before.ru_stime
    cost.total = cost.kernel + after.ru_utime - before.ru_utime


def cost_us(runs: Callable[[int], Coroutine[Any, Any, None]], in_flight: int) -> Cost:
    """Return the microseconds of a prompt."""
    cost = Cost()
    with counted(cost):
        run_on_virtual_time(runs(in_flight))
    scale = 1e6 / PROMPTS
    return Cost(scale * cost.total, scale * cost.kernel, scale * cost.collector)


def measure(in_flight: int) -> tuple[Cost, Cost]:
    """Return what a prompt costs in all, and without the orchestrator."""
    tune_gc(prompts=in_flight)  # as a run does
    return cost_us(run, in_flight), cost_us(run_bare, in_flight)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a prompt by the number in flight.")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cost_us(run, IN_FLIGHT[0])  # warms up
    rounds = [{in_flight: measure(in_flight) for in_flight in IN_FLIGHT} for _ in range(arguments.rounds)]
    rows = []
    for in_flight in IN_FLIGHT:
        found = [each[in_flight] for each in rounds]
        first = [each[IN_FLIGHT[0]] for each in rounds]
        own = [whole.total - bare.total for whole, bare in found]
        own_first = [whole.total - bare.total for whole, bare in first]
        rows.append(
            [
                f"{in_flight:,}",
                median([whole.total for whole, _ in found]),
                median([bare.total for _, bare in found]),
                median(own),
                median([whole.collector - bare.collector for whole, bare in found]),
                median([whole.kernel - bare.kernel for whole, bare in found]),
                spread([a[0].total / b[0].total for a, b in zip(found, first, strict=True)]),
                spread([a / b for a, b in zip(own, own_first, strict=True)]),
            ]
        )
    show(
        f"CPU us a prompt; {PROMPTS:,} prompts of {4 + 2 * PROBES} requests",
        ["in flight", "in all", "without orchestrator", "orchestrator", "collector", "kernel", "in all, x", "orch., x"],
        rows,
        [f"goal: orchestrator at most {GOAL} x at {IN_FLIGHT[-1]:,}; collector and kernel are parts of it"],
    )


def median(values: list[float]) -> str:
    return f"{statistics.median(values):.0f}"


if __name__ == "__main__":
    main()
