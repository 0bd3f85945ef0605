"""Trains for long on a bad teacher, with replicas that are killed, and sees that the run needs no more at its end.

    python tests/support/soak.py runs/soak --iterations 1000

The teacher is behind a proxy that spoils some replies and lets others hang. The student has two servers, which take its
versions as adapters, and one of them is killed every minute. The run must end, `verify-run` must find every prompt
trained once, and memory, open files and directories must be after the last iteration what they were after the
hundredth, or a tenth of the iterations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from faulty_proxy import Fault, FaultyProxy, Plan
from kill_drill import ROOT, DrillError, command, descendants, rows, verified
from rich.console import Console

BAD, HANGING = 0.14, 0.024  # shares of the teacher's replies
BAD_FAULTS = [Fault.CUT, Fault.CORRUPT, Fault.NAN, Fault.DUPLICATE, Fault.GATEWAY, Fault.ERROR, Fault.RESET]
HANGS_S = 3600.0
LOOK_S = 0.5
LOOKS = 120  # whose median is compared, those of a minute: with each kill figures rise and fall
MOST_GROWTH = 1.05
SAID = Console(highlight=False, soft_wrap=True)
KEYS = (
    "training.batch_size=16",
    "training.mini_batch_size=16",
    "training.checkpoint_every=20",
    "training.warmup_iterations=0",
    "training.lora={rank: 4, targets: all}",
    "student.backend={kind: local, replicas: 2, weights: {transport: adapter}}",
    "student.serving.restarts=10000",
    "student.serving.own_cores=0",
    "sampling.max_response_tokens=24",
    "stages.attempt_timeout_s=2",
    "max_staleness=1",
    "evaluation=null",
    "run.samples_every=0",
)


class Look(msgspec.Struct, frozen=True):
    """What the run's own process holds at one moment."""

    iteration: int
    rss_kib: int
    data_kib: int  # VmData
    open_files: int
    directories: int  # below the run's


def spoiling(seed: int) -> Plan:
    """Return a plan with which some replies to the teacher's requests are bad, and some never come."""

    def plan(number: int, path: str) -> Fault | None:
        draw = random.Random(f"{seed}:{number}")
        at = draw.random() if path == "/score" else 1.0
        if at < HANGING:
            return Fault.SLOW
        return draw.choice(BAD_FAULTS) if at < HANGING + BAD else None

    return plan


@contextlib.asynccontextmanager
async def teacher() -> AsyncIterator[tuple[str, int]]:
    """Serve the teacher, and give its address."""
    serving = command("serve", "examples/running_sum/teacher", "--port", "0")
    process = await asyncio.create_subprocess_exec(*serving, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        first = (await process.stderr.readline()).decode()
        if "port" not in first:
            raise DrillError(f"the teacher was not served: {first}")
        yield "127.0.0.1", int(first.split()[-1])
    finally:
        process.kill()
        await process.wait()


async def soak(directory: Path, iterations: int, kill_every_s: float, seed: int = 0) -> Sequence[Look]:
    """Make the run in an empty directory, and return the looks at it. Raises DrillError."""
    run = directory / "run"
    async with teacher() as address, FaultyProxy(address, spoiling(seed), byte_s=HANGS_S) as proxy:
        keys = [*KEYS, f"run.directory={run}", f"training.iterations={iterations}"]
        keys.append(f"teacher.backend={{kind: local, url: '{proxy.url}'}}")
        with (directory / "output.log").open("wb") as log:
            words = command("train", "configs/running_sum/opd.yaml", *keys)
            process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=log, stderr=log)
        try:
            async with asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(kill_servers(process.pid, run, kill_every_s, random.Random(seed))),
                    group.create_task(look_on(process.pid, run, directory / "looks.jsonl")),
                ]
                code = await process.wait()
                for task in beside:
                    task.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    SAID.print(f"exit code {code}; of {proxy.requests} requests to the teacher {proxy.met.total()} were spoilt")
    if code != 0:
        raise DrillError(f"{run}: ended with code {code}: {(directory / 'output.log').read_text()[-2000:]}")
    await asyncio.to_thread(verified, run)
    looks = (directory / "looks.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Look) for line in looks]


async def kill_servers(pid: int, run: Path, every_s: float, rng: random.Random) -> None:
    """Kill one of the student's servers now and then, once training continues."""
    while True:
        await asyncio.sleep(every_s)
        students = [each for each, line in descendants(pid) if "spot_async.serving" in line and "/student" in line]
        if students and rows(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(students), signal.SIGKILL)


async def look_on(pid: int, run: Path, path: Path) -> None:
    """Write down what the run's process holds, again and again."""
    while True:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(OSError, KeyError):  # it starts, or ends
            seen = await asyncio.to_thread(look, pid, run)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(seen) + b"\n")


def look(pid: int, run: Path) -> Look:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Look(
        iteration=rows(run),
        rss_kib=int(status["VmRSS"].split()[0]),
        data_kib=int(status["VmData"].split()[0]),
        open_files=len([*Path(f"/proc/{pid}/fd").iterdir()]),
        directories=sum(each.is_dir() for each in run.rglob("*")),
    )


def medians(looks: Sequence[Look], iteration: int) -> dict[str, float]:
    """Return what was held in the looks at and before an iteration."""
    last = [each for each in looks if 0 < each.iteration <= iteration][-LOOKS:]
    names = [name for name in Look.__struct_fields__ if name != "iteration"]
    return {name: statistics.median(getattr(each, name) for each in last) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    given = parser.parse_args()
    shutil.rmtree(given.directory, ignore_errors=True)
    given.directory.mkdir(parents=True)
    looks = asyncio.run(soak(given.directory, given.iterations, given.kill_every_s))
    early, late = medians(looks, max(1, given.iterations // 10)), medians(looks, given.iterations)
    for name in early:
        SAID.print(
            f"{name}: {early[name]:,.0f}, then {late[name]:,.0f} ({100 * (late[name] / early[name] - 1):+.1f} %)"
        )
    grown = [name for name in early if late[name] > MOST_GROWTH * early[name]]
    if grown:
        raise DrillError(f"grew by more than {100 * (MOST_GROWTH - 1):.0f} %: {', '.join(grown)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DrillError as error:
        sys.exit(str(error))
