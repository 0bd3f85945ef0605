"""Measures how much of its servers' time an iteration leaves unused: wall time of a strict SPOT iteration to its batch.

    python benchmarks/overlap.py

The iteration runs as in training, with student and teacher servers of the shipped example, 64 prompts and every stage.
It is compared with

(a) the same requests, phase by phase, with all of a phase at once: rollouts, scores, candidates, probes;
(b) those to the student's server alone, all at once;
(c) the longest chain of rollout, score, probe and verify, on idle servers.

No side trains, since a strict run trains when the batch is there. The goal is 1.15 times the larger of (b) and (c). All
take turns for some rounds; the ratio is taken within each round, and its median counts. (a) and (b) use the same client
and connections. Requests of a prompt that are made at once share an HTTP request, as in training. So (b) makes a few
less of them, which does not favour the iteration.

The student's server has a core of its own, as in the quickstart (`--own-cores 0`: all share all cores). Wall times need
two idle cores. On a machine that others use too, the second table says more: CPU seconds of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pipeline import EXAMPLE, make_orchestrator
from report import show, spread

from spot_async.backends.local.backend import LocalBackend
from spot_async.base.processes.resources import CoreShares, available_cores, confined, share_cores, tune_gc
from spot_async.base.tasks import gather
from spot_async.config import StagesConfig
from spot_async.types import Generation, ScoreRequest

PROMPTS = 64
MAX_RESPONSE_TOKENS = 160
TIMEOUT_S = 300.0
GOAL = 1.15
LONGEST_CHAINS = 4
PROCESSES = ("orchestrator", "student", "teacher")

Call = Callable[[], Awaitable[Any]]


class Recorder:
    """Passes requests on to student and teacher, and keeps them by phase, so that they can be sent again."""

    def __init__(self, student: LocalBackend, teacher: LocalBackend) -> None:
        self.phases: dict[str, list[Call]] = {"rollout": [], "score": [], "candidates": [], "probe": []}
        self.chain_tokens: dict[str, list[int]] = {}  # by session: the rollout's tokens, then its probes'
        self._student, self._teacher = student, teacher

    async def generate(self, *request: Any, session: str, deadline: float, **more: Any) -> Generation:
        phase = "probe" if session in self.chain_tokens else "rollout"
        lengths = self.chain_tokens.setdefault(session, [])
        reply: Generation = await self._sent(
            phase, lambda: self._student.generate(*request, session=session, deadline=soon(), **more)
        )
        lengths.append(len(reply.token_ids))
        return reply

    async def score(self, request: ScoreRequest, **more: Any) -> Any:
        return await self._sent("score", lambda: self._teacher.score(due_soon(request), **more))

    async def candidate_logprobs(self, request: ScoreRequest, *asked: Any, **more: Any) -> Any:
        return await self._sent(
            "candidates", lambda: self._student.candidate_logprobs(due_soon(request), *asked, **more)
        )

    async def _sent(self, phase: str, call: Call) -> Any:
        self.phases[phase].append(call)
        return await call()

    def longest_chains(self) -> list[int]:
        """Return the ordinals of the prompts whose rollout and longest probe have most tokens together."""
        tokens = {session: lengths[0] + max(lengths[1:], default=0) for session, lengths in self.chain_tokens.items()}
        longest = sorted(tokens, key=lambda session: -tokens[session])[:LONGEST_CHAINS]
        return [int(session.rpartition("-")[2]) for session in longest]


def soon() -> float:
    return asyncio.get_running_loop().time() + TIMEOUT_S


def due_soon(request: ScoreRequest) -> ScoreRequest:
    return msgspec.structs.replace(request, deadline=soon())


async def timed(work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def measured(work: Awaitable[Any], servers: Sequence[LocalBackend]) -> tuple[float, list[float]]:
    """Return wall seconds, and CPU seconds of this process and of each server."""
    before = await cpu_seconds(servers)
    wall_s = await timed(work)
    after = await cpu_seconds(servers)
    return wall_s, [end - start for start, end in zip(before, after, strict=True)]


async def cpu_seconds(servers: Sequence[LocalBackend]) -> list[float]:
    return [time.process_time(), *[(await server.stats(deadline=soon())).cpu_s for server in servers]]


async def phase_by_phase(phases: dict[str, list[Call]]) -> None:
    for calls in phases.values():
        await at_once(calls)


async def at_once(calls: list[Call]) -> None:
    async def one(call: Call) -> None:
        await call()

    await gather(one(call) for call in calls)


async def measure(
    rounds: int, directory: Path, cores: CoreShares
) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Return wall seconds, and CPU seconds of each of `PROCESSES`, by what was measured, with one entry per round."""
    async with AsyncExitStack() as stack:
        servers = student, teacher = [
            await stack.enter_async_context(
                LocalBackend(
                    LocalBackend.Settings().of_run(cores.own.get(role)),
                    role=role,
                    model=str(EXAMPLE / role),
                    run_directory=directory,
                )
            )
            for role in ("student", "teacher")
        ]
        times: dict[str, list[float]] = {"overlapped": [], "phases": [], "student": [], "chain": []}
        cpu: dict[str, list[list[float]]] = {"overlapped": [], "phases": [], "student": []}
        for round_number in range(rounds + 1):
            recorder = Recorder(student, teacher)
            orchestrator = make_orchestrator(
                recorder,
                recorder,
                StagesConfig(),
                batch_size=PROMPTS,
                iterations=1,
                max_response_tokens=MAX_RESPONSE_TOKENS,
            )
            tune_gc()  # as a run does before its first iteration
            found, used = {}, {}
            found["overlapped"], used["overlapped"] = await measured(orchestrator.run(), servers)
            phases = recorder.phases
            found["phases"], used["phases"] = await measured(phase_by_phase(phases), servers)
            everything = phases["rollout"] + phases["candidates"] + phases["probe"]
            found["student"], used["student"] = await measured(at_once(everything), servers)
            alone = make_orchestrator(
                *[Recorder(student, teacher)] * 2,
                StagesConfig(),
                batch_size=PROMPTS,
                iterations=1,
                max_response_tokens=MAX_RESPONSE_TOKENS,
            )
            prompts = {prompt.ordinal: prompt for prompt in itertools.islice(alone._prompts, PROMPTS)}  # endless
            chains = [prompts[ordinal] for ordinal in recorder.longest_chains()]
            policy, stages = alone._policy, alone.stages
            found["chain"] = max([await timed(policy.supervise(p, stages.for_prompt(p))) for p in chains])
            if round_number:  # the first round only opens connections and grows buffers
                for name, wall_s in found.items():
                    times[name].append(wall_s)
                for name, cpu_s in used.items():
                    cpu[name].append(cpu_s)
    return times, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of a strict iteration beside its lower bounds.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--own-cores", type=int, default=1, help="cores that the student's server has to itself")
    arguments = parser.parse_args()
    cores = share_cores(available_cores(), {"student": arguments.own_cores})
    with tempfile.TemporaryDirectory() as directory, confined(cores):
        (Path(directory) / "logs").mkdir()
        times, cpu = asyncio.run(measure(arguments.rounds, Path(directory), cores))
    bound = np.maximum(times["student"], times["chain"])
    names = {
        "overlapped": "strict iteration up to its batch",
        "phases": "(a) the same, phase by phase",
        "student": "(b) the student's requests at once",
        "chain": "(c) the longest chain",
    }
    rows = [[names[name], spread(seconds), spread(list(np.array(seconds) / bound))] for name, seconds in times.items()]
    ratios = np.array(times["overlapped"]) / bound
    quarter, ratio, three_quarters = np.quantile(ratios, [0.25, 0.5, 0.75])
    show(
        f"{PROMPTS} prompts, {arguments.rounds} rounds",
        ["wall", "seconds", "x max(b, c)"],
        rows,
        [
            *cores.warnings,
            f"goal: at most {GOAL} x max(b, c); found {ratio:.2f}, middle half {quarter:.2f}..{three_quarters:.2f}",
        ],
    )
    show(
        f"{PROMPTS} prompts, {arguments.rounds} rounds",
        ["CPU seconds", *PROCESSES],
        [[names[name], *(spread([*seconds]) for seconds in zip(*rows, strict=True))] for name, rows in cpu.items()],
        [f"load of the machine in the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"],
    )


if __name__ == "__main__":
    main()
