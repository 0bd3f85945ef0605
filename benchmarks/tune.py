"""Measures what the limits of `spot-async tune` gain over the configured ones, in strict iterations of the quickstart.

    python benchmarks/tune.py

It first runs the command as a user would. Then it runs pairs of strict SPOT iterations up to their batch (64 prompts,
every stage, real student and teacher servers, no training): one with the configuration's limits and one with those that
tune wrote, which of them first in turns. Ratios are taken within a pair.

Limits only have to keep servers busy. If the configured ones do, a ratio of 1 with less waiting at the servers is the
best there can be. Wall times need two idle cores. On a machine that others use too, the last column says more: CPU
seconds of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from overlap import measured
from pipeline import EXAMPLE, make_orchestrator
from report import show, spread
from toy_runs import SPOT_KEYS

from spot_async.backends.local.backend import LocalBackend
from spot_async.base.processes.resources import tune_gc
from spot_async.config import StagesConfig
from spot_async.config.loading import load_config
from spot_async.tools.simulate.measured import Tuning, read_tuning

CONFIG = "configs/quickstart.yaml"
KEYS = [f"{key}={value}" for key, value in SPOT_KEYS.items()]
ROOT = Path(__file__).parent.parent


def tuned(directory: Path, seconds: float) -> tuple[Tuning, StagesConfig]:
    """Run the command; return what it found, and the limits that it wrote."""
    output = directory / "quickstart.tuned.yaml"
    command = [sys.executable, "-m", "spot_async", "tune", CONFIG, *KEYS, "--seconds", f"{seconds:g}"]
    command += ["-o", str(output)]
    subprocess.run(command, cwd=ROOT, check=True)
    os.chdir(ROOT)  # paths in the configuration are relative to it
    return read_tuning(output.with_suffix(".json")), load_config(output).stages


async def measure(
    pairs: int, directory: Path, limits: dict[str, StagesConfig]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall and CPU seconds of iterations by whose limits they had, with one entry for each pair."""
    wall: dict[str, list[float]] = {name: [] for name in limits}
    cpu: dict[str, list[float]] = {name: [] for name in limits}
    async with AsyncExitStack() as stack:
        student, teacher = servers = [
            await stack.enter_async_context(
                LocalBackend(LocalBackend.Settings(), role=role, model=str(EXAMPLE / role), run_directory=directory)
            )
            for role in ("student", "teacher")
        ]
        for pair in range(pairs + 1):
            for name in sorted(limits, reverse=bool(pair % 2)):
                orchestrator = make_orchestrator(
                    student, teacher, limits[name], batch_size=64, iterations=1, max_response_tokens=160
                )
                tune_gc()  # as a run does before its first iteration
                wall_s, cpu_s = await measured(orchestrator.run(), servers)
                if pair:  # the first pair only opens connections and grows buffers
                    wall[name].append(wall_s)
                    cpu[name].append(sum(cpu_s))
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="Strict iterations with the limits of `tune` against the defaults.")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each server, as of `spot-async tune`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "logs").mkdir()
        found, recommended = tuned(directory, arguments.seconds)
        configured = load_config(Path(CONFIG), KEYS).stages
        limits = {"configured": configured, "recommended": recommended}
        wall, cpu = asyncio.run(measure(arguments.pairs, directory, limits))
    ratios = np.array(wall["recommended"]) / np.array(wall["configured"])
    quarter, ratio, three_quarters = np.quantile(ratios, [0.25, 0.5, 0.75])
    show(
        "limits, requests in flight",
        ["key", "configured", "recommended"],
        [[each.key, str(each.configured), str(each.recommended)] for each in found.recommendations],
    )
    show(
        f"one strict iteration of 64 prompts up to its batch, {arguments.pairs} pairs",
        ["limits", "seconds", "x configured", "CPU seconds"],
        [
            [name, spread(wall[name]), spread(list(np.array(wall[name]) / wall["configured"])), spread(cpu[name])]
            for name in limits
        ],
        [
            f"recommended over configured: {ratio:.2f}, middle half {quarter:.2f}..{three_quarters:.2f}",
            f"load of the machine in the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        ],
    )


if __name__ == "__main__":
    main()
