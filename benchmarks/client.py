"""Measures the CPU time that requests cost the orchestrator's process, with a server that computes nothing.

    python benchmarks/client.py

1. One small `generate` request: by bare aiohttp and by `HttpEndpoint`, both without encoding, decoding or checks; then
   by the local backend, which encodes the request and reads and checks the reply.
2. A whole SPOT sample through the real orchestrator, policy and verifier: 1 rollout, 1 score, 1 candidate request,
   8 probes, 9 verdicts, of eight tokens each.

The ways take turns, and the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import numpy as np
from pipeline import EXAMPLE, PROBES, VOCAB, make_orchestrator
from report import show

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.shared.held_weights import HeldWeights
from spot_async.backends.shared.http import HttpEndpoint, Route
from spot_async.base import wire
from spot_async.base.processes.resources import tune_gc
from spot_async.config import ScoreStageConfig, StageConfig, StagesConfig
from spot_async.serving import api
from spot_async.types import Capabilities, SamplingSettings

URL = "http://localhost"
IN_FLIGHT = (64, 256, 1024)
SAMPLES_IN_FLIGHT = (64, 1024)
GOAL_MS = 0.45

PROMPT = np.arange(20, 44, dtype=np.int32)
SAMPLING = SamplingSettings(max_tokens=8, stop_token_ids=(1,), seed=1)
BODY = wire.encode(api.GenerateRequest(prompt_ids=PROMPT, sampling=SAMPLING, timeout_s=60.0))

Ask = Callable[[], Awaitable[object]]


async def cpu_ms_per_request(ask: Ask, in_flight: int, count: int) -> float:
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask()

    started = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(worker())
    return (time.process_time() - started) / count * 1e3


def soon() -> float:
    return asyncio.get_running_loop().time() + 60.0


async def make_backend(stack: AsyncExitStack, uds: str, directory: Path) -> LocalBackend:
    """Return a local backend that talks to the stub instead of starting a server."""
    settings = LocalBackend.Settings()
    backend = LocalBackend(settings, role="student", model=str(EXAMPLE / "student"), run_directory=directory)
    backend._server.endpoint = await stack.enter_async_context(HttpEndpoint("student", URL, route=Route(uds)))
    backend._capabilities = Capabilities(
        model="stub",
        vocab_size=VOCAB,
        vocab_fingerprint="",
        max_context_tokens=512,
        max_top_k=VOCAB,
        exact_entropy=True,
        candidate_logprobs="batched",
        weight_update=True,
    )
    backend._held = HeldWeights("student")
    return backend


async def ways_to_ask(stack: AsyncExitStack, uds: str, backend: LocalBackend) -> dict[str, Ask]:
    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(uds, limit=0))
    await stack.enter_async_context(session)

    async def by_aiohttp() -> None:
        async with session.post(URL + api.GENERATE, data=BODY) as reply:
            await reply.read()

    async def by_endpoint() -> None:
        await backend._server.endpoint.post(api.GENERATE, BODY, content_type=api.CONTENT_TYPE, deadline=soon())

    async def by_backend() -> None:
        await backend.generate(PROMPT, SAMPLING, deadline=soon())

    async def by_session() -> None:
        group = (backend.generate(PROMPT, SAMPLING, session="one", deadline=soon()) for _ in range(8))
        await asyncio.gather(*group)

    return {
        "bare aiohttp": by_aiohttp,
        "HttpEndpoint": by_endpoint,
        "local backend, all included": by_backend,
        "local backend, 8 of a session": by_session,
    }


async def cpu_ms_per_sample(backend: LocalBackend, in_flight: int, iterations: int) -> float:
    """Return the CPU milliseconds of a sample. Each iteration is a run by itself: the stub's weights never change."""
    stage = StageConfig(concurrency=PROBES * in_flight)
    score = ScoreStageConfig(concurrency=PROBES * in_flight)
    cpu_s = 0.0
    for _ in range(iterations):
        orchestrator = make_orchestrator(
            backend,
            backend,
            StagesConfig(rollout=stage, score=score, candidates=stage, probe=stage, verify=stage),
            batch_size=in_flight,
            iterations=1,
            max_response_tokens=64,
        )
        started = time.process_time()
        await orchestrator.run()
        cpu_s += time.process_time() - started
    return cpu_s / (in_flight * iterations) * 1e3


@contextmanager
def stub(directory: Path) -> Iterator[str]:
    uds = str(directory / "stub")
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "stub_server.py"), uds], stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    server.stdout.readline()
    try:
        yield uds
    finally:
        server.terminate()
        server.wait()


async def measure(arguments: argparse.Namespace, directory: Path, uds: str) -> None:
    async with AsyncExitStack() as stack:
        backend = await make_backend(stack, uds, directory)
        ways = await ways_to_ask(stack, uds, backend)
        gc.collect()
        tune_gc()  # as a run does
        best: dict[tuple[str, int], float] = {}
        for round_number in range(arguments.rounds + 1):
            for in_flight in IN_FLIGHT:
                for name, ask in ways.items():
                    of_each = 8 if "session" in name else 1
                    count = arguments.requests // of_each
                    cpu_ms = await cpu_ms_per_request(ask, max(1, in_flight // of_each), count) / of_each
                    if round_number:  # the first round only opens the connections
                        best[name, in_flight] = min(cpu_ms, best.get((name, in_flight), cpu_ms))
        samples = {
            in_flight: min(
                [await cpu_ms_per_sample(backend, in_flight, 1024 // in_flight) for _ in range(arguments.rounds)]
            )
            for in_flight in SAMPLES_IN_FLIGHT
        }
    columns = ["CPU ms a request", *(f"{in_flight} in flight" for in_flight in IN_FLIGHT)]
    rows = [[name, *(f"{best[name, in_flight]:.3f}" for in_flight in IN_FLIGHT)] for name in ways]
    notes = [
        f"a SPOT sample, {in_flight} prompts in flight: {cpu_ms:.2f} ms of orchestrator CPU"
        for in_flight, cpu_ms in samples.items()
    ]
    show(f"best of {arguments.rounds} rounds; goal: {GOAL_MS} ms all included", columns, rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of the client's side of a request and of a SPOT sample.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stub(Path(directory)) as uds:
        asyncio.run(measure(arguments, Path(directory), uds))


if __name__ == "__main__":
    main()
