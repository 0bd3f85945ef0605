"""Measures what staleness brings on real servers, beside the bound and beside what `spot-async simulate` predicted.

    python benchmarks/asynchrony.py

The quickstart's student trains with the quickstart's teacher behind an endpoint that is slow in a known way: a request
waits for its turn at a stated rate of tokens, and then for a stated latency. Strict runs and runs with staleness take
turns. After the first strict run, `spot-async simulate --from` it says what the others will need; the bound is its
bound too, from the rates that the run measured.

The endpoint is slow enough to be the bottleneck. Servers and trainer that share two cores slow each other, which no
simulation of separate servers knows.

An iteration's seconds are those between the ends of two iterations; the first ones do not count. The trainer is idle
while it does not train. Wall times need two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from report import show, spread
from toy_runs import SPOT_KEYS

from spot_async.base import wire
from spot_async.serving import api

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart.yaml"
TEACHER = ROOT / "examples" / "running_sum" / "teacher"
HOP_BY_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "date", "server"})


class Measured(NamedTuple):
    """One run, after its warm-up."""

    iteration_s: float
    idle: float  # share of the trainer's time
    lag: float  # mean over its iterations


@asynccontextmanager
async def slow_endpoint(uds: Path, *, tokens_per_s: float, latency_s: float) -> AsyncIterator[str]:
    """Give the URL of an endpoint in front of a server on `uds`, whose scores take turns and time."""
    loop, free_s = asyncio.get_running_loop(), 0.0

    async def answer(request: web.Request) -> web.Response:
        nonlocal free_s
        body = await request.read()
        if request.path == api.SCORE:
            asked = wire.decode(body, api.ScoreRequest)
            free_s = max(free_s, loop.time()) + (len(asked.prompt_ids) + len(asked.response_ids)) / tokens_per_s
            await asyncio.sleep(free_s - loop.time() + latency_s)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        async with session.request(
            request.method, f"http://localhost{request.path}", data=body, headers=headers
        ) as reply:
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP}
            return web.Response(body=await reply.read(), status=reply.status, headers=kept)

    application = web.Application(client_max_size=1 << 28)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(uds), limit=0)) as session:
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def teacher_server(folder: Path) -> AsyncIterator[Path]:
    """Give the socket of a server of the example's teacher."""
    uds = folder / "teacher.sock"
    command = [sys.executable, "-m", "spot_async", "serve", str(TEACHER), "--uds", str(uds)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(120.0), aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(uds))) as session:
            while True:
                try:
                    async with session.get(f"http://localhost{api.HEALTH}"):
                        break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.2)
        yield uds
    finally:
        process.terminate()
        await process.wait()


async def spot_async(*arguments: str) -> str:
    """Run a command and return what it printed. Ends the benchmark if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spot_async", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, errors = await process.communicate()
    if process.returncode:
        raise SystemExit(f"spot-async {' '.join(arguments)}: exit code {process.returncode}\n{errors.decode()[-3000:]}")
    return said.decode()


def measured(directory: Path, warm_up: int) -> Measured:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][warm_up:]
    wall_s = sum(row["time/iteration_s"] for row in rows)
    trained_s = sum(row["time/train_s"] for row in rows)
    lag = statistics.fmean(row.get("train/lag_mean", 0.0) for row in rows)
    return Measured(wall_s / len(rows), 1.0 - trained_s / wall_s, lag)


async def compare(given: argparse.Namespace, folder: Path) -> None:
    found: dict[int, list[Measured]] = {n: [] for n in given.staleness}
    predicted: dict[int, Any] = {}
    async with (
        teacher_server(folder) as uds,
        slow_endpoint(uds, tokens_per_s=given.tokens_per_s, latency_s=given.latency_s) as url,
    ):
        for turn in range(given.rounds):
            for n in given.staleness:
                directory = folder / f"staleness-{n}-{turn}"
                keys = {
                    "run.directory": directory,
                    "run.seed": turn,
                    "teacher.backend": f"{{kind: local, url: '{url}'}}",
                    "evaluation": "null",
                    "training.iterations": given.iterations,
                    "max_staleness": n,
                    **SPOT_KEYS,
                }
                await spot_async("train", str(CONFIG), *(f"{key}={value}" for key, value in keys.items()))
                found[n].append(measured(directory, given.warm_up))
                sys.stderr.write(f"round {turn + 1}, max_staleness={n}: {found[n][-1]}\n")
                if not predicted:
                    deepest = str(max(given.staleness))
                    config = str(directory / "config.yaml")
                    said = await spot_async(
                        "simulate", config, "--from", str(directory), "--json", "--max-staleness", deepest
                    )
                    predicted = {each["max_staleness"]: each for each in json.loads(said)["outcomes"]}
    rows = []
    for n, runs in found.items():
        seconds = statistics.median(each.iteration_s for each in runs)
        guess, bound = predicted[n]["iteration_s"], predicted[n]["bound"]["seconds"]
        rows.append(
            (
                str(n),
                spread([each.iteration_s for each in runs]),
                f"{100 * statistics.median(each.idle for each in runs):.0f} %",
                f"{statistics.median(each.lag for each in runs):.2f}",
                f"{guess:.2f} ({100 * (guess / seconds - 1):+.0f} %)",
                f"{bound:.2f}",
                f"{seconds / bound:.2f}",
            )
        )
    show(
        f"Seconds an iteration, teacher at {given.tokens_per_s:,.0f} tokens/s after {given.latency_s:g} s",
        ("max_staleness", "measured", "trainer idle", "mean lag", "predicted from strict", "bound", "measured / bound"),
        rows,
        [f"Median of {given.rounds} runs of {given.iterations} iterations, {given.warm_up} of which do not count."],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2], help="the first one must be 0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--latency-s", type=float, default=0.5)
    parser.add_argument("--tokens-per-s", type=float, default=2000.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(given, Path(folder)))


if __name__ == "__main__":
    main()
