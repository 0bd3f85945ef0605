"""Kills processes of real runs at random moments and continues the runs, until so many processes are killed.

    python tests/support/kill_drill.py runs/kills --kills 100

Runs are of the quickstart's size: SPOT and GRPO, strict and with staleness, on one rank, two, and two that share the
student. A kill is SIGKILL to the orchestrator, a rank, or a server. A run that ends of it is checked with `verify-run`
and resumed. In the end `verify-run` must find every prompt trained once. A strict run must have the weights, bit for
bit, of the same run that nobody killed. Finished runs are not made again, so the command continues where it was
stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
SHORT = (  # of iterations that take a moment
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    "sampling.max_response_tokens=64",
)
KEYS = ("training.iterations=16", "training.checkpoint_every=3", "evaluation.samples=1", "evaluation.eval_every=5")
KILLS_A_RUN = 5
MEAN_S = 3.0  # between the moment that is waited for and the kill
LONGEST_S = 900.0  # until a run ends that nobody kills any more
ROLES = {  # by what is on a process's command line
    "spot_async.trainer": "rank",
    "running_sum/student": "student or reference",  # GRPO's reference serves the same directory
    "running_sum/teacher": "teacher",
}


class Cell(NamedTuple):
    policy: str
    max_staleness: int
    ranks: int
    sharding: str

    @property
    def name(self) -> str:
        return f"{self.policy}-staleness-{self.max_staleness}-{self.ranks}-{self.sharding}"

    @property
    def keys(self) -> Sequence[str]:
        return (
            f"max_staleness={self.max_staleness}",
            f"training.ranks={self.ranks}",
            f"training.sharding={self.sharding}",
            *KEYS,
        )


CELLS = [
    Cell(policy, staleness, ranks, sharding)
    for (ranks, sharding), staleness, policy in itertools.product(
        [(1, "none"), (2, "fsdp2"), (2, "none")], [0, 1], ["spot", "grpo"]
    )
]


class Kill(msgspec.Struct, frozen=True):
    role: str
    after_s: float  # since the run's start, or the last kill that it outlived
    iteration: int  # how many were complete
    is_end: bool  # the run ended of it


class Drilled(msgspec.Struct, frozen=True):
    """A run that was killed and ended well."""

    cell: str
    number: int
    kills: list[Kill]
    checks: int  # by verify-run
    is_equal: bool | None  # to the run that nobody killed; None with staleness, where timing decides


class DrillError(Exception):
    """A run did not continue, or lost or repeated something."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, which also seeds its kills")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    record = given.directory / "drilled.jsonl"
    done = (
        [msgspec.json.decode(line, type=Drilled) for line in record.read_bytes().splitlines()]
        if record.exists()
        else []
    )
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("processes killed", total=given.kills, completed=kills_of(done))
        for number in itertools.count(given.first):
            if kills_of(done) >= given.kills:
                break
            if any(each.number == number for each in done):
                continue
            found = drilled(CELLS[number % len(CELLS)], number, given.directory)
            with record.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
            done.append(found)
            progress.update(bar, completed=kills_of(done))
    show(done)
    return 0


def kills_of(runs: Sequence[Drilled]) -> int:
    return sum(len(each.kills) for each in runs)


def drilled(cell: Cell, number: int, directory: Path) -> Drilled:
    """Make a run, kill its processes, and continue until it is done. Raises DrillError."""
    place, rng = directory / f"{number:03d}", random.Random(number)
    shutil.rmtree(place, ignore_errors=True)  # of a drill that was stopped
    place.mkdir()
    run = place / "run"
    config = ROOT / "configs" / "running_sum" / f"{cell.policy}.yaml"
    first = command("train", str(config), f"run.directory={run}", *cell.keys)
    kills: list[Kill] = []
    checks, given = 0, first
    while True:
        code, said = killed(given, run, rng, kills)
        if code == 0:
            break
        if not kills or not kills[-1].is_end:
            raise DrillError(f"{run}: ended with code {code}, and nobody killed it: {said}")
        if has_checkpoint(run):
            checks += verified(run)
        given = again(run, first)
    checks += verified(run)
    is_equal = None
    if cell.max_staleness == 0:
        is_equal = weights(run) == weights(undisturbed(cell, directory))
        if not is_equal:
            raise DrillError(f"{run}: has other weights than the run that nobody killed")
    return Drilled(cell.name, number, kills, checks, is_equal)


def killed(given: list[str], run: Path, rng: random.Random, kills: list[Kill]) -> tuple[int, str]:
    """Run a command and kill its processes, until it ends. Return its exit code and the end of what it said."""
    log = run.with_name("output.log")
    with log.open("ab") as file:
        process = subprocess.Popen(given, cwd=ROOT, stdout=file, stderr=file)
        try:
            while len(kills) < KILLS_A_RUN:
                began_s = time.monotonic()
                if ends_before_a_random_moment(process, run, rng):
                    break
                role, pid = victim(process, rng)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                kills.append(Kill(role, round(time.monotonic() - began_s, 2), rows(run), is_end=False))
                if pid == process.pid:
                    break
            process.wait(LONGEST_S)
        finally:
            process.kill()
    if process.returncode != 0 and kills:
        kills[-1] = msgspec.structs.replace(kills[-1], is_end=True)
    return process.returncode, log.read_text(errors="replace")[-2000:]


def ends_before_a_random_moment(process: subprocess.Popen[bytes], run: Path, rng: random.Random) -> bool:
    """Wait for some more iterations, or for none, so that starts are hit too, and then for a random time."""
    wanted = rows(run) + rng.choice([0, 0, 1, 2, 4])
    while rows(run) < wanted:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            return True
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(rng.expovariate(1 / MEAN_S))
        return True
    return False


def victim(process: subprocess.Popen[bytes], rng: random.Random) -> tuple[str, int]:
    """Return one of a run's processes that is alive, and what it does."""
    found = [(role, pid) for pid, line in descendants(process.pid) for role in _roles(line)]
    return rng.choice([("orchestrator", process.pid), *found])


def _roles(line: str) -> list[str]:
    return [role for part, role in ROLES.items() if part in line][:1]


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Return the living processes below one, each with its command line. Any of them may end meanwhile."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(path).split():
            yield int(child), _read(Path(f"/proc/{child}/cmdline")).replace("\0", " ")
            yield from descendants(int(child))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def undisturbed(cell: Cell, directory: Path) -> Path:
    """Return the same run with nobody to kill it, made once."""
    run = directory / f"whole-{cell.name}"
    if not (run / "summary.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        config = ROOT / "configs" / "running_sum" / f"{cell.policy}.yaml"
        subprocess.run(
            command("train", str(config), f"run.directory={run}", *cell.keys), check=True, cwd=ROOT, capture_output=True
        )
    return run


def verified(run: Path) -> int:
    done = subprocess.run(command("verify-run", str(run)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0 or "no prompt is trained twice, and none is lost" not in done.stdout:
        raise DrillError(f"{run}: verify-run ended with {done.returncode}: {done.stdout}{done.stderr}")
    return 1


def kill_when(moment: Callable[[Path], bool], run: Path, given: list[str]) -> None:
    """Run a command, and kill it at this moment of its run, which has a checkpoint then."""
    with subprocess.Popen(given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while not (has_checkpoint(run) and moment(run)):
                assert process.poll() is None, f"it ended first: {process.communicate()[0]}"
                time.sleep(0.001)  # a file is looked for that is there for some milliseconds
        finally:
            process.kill()


def command(*given: str) -> list[str]:
    return [sys.executable, "-m", "spot_async", *given]


def with_heartbeats(given: list[str], timeout_s: float) -> list[str]:
    """Return a command of ours for which a machine is lost after so short a silence."""
    patched = f"import runpy; from spot_async.base import retry; retry.HEARTBEAT_TIMEOUT_S = {timeout_s}; "
    return [given[0], "-c", f"{patched}runpy.run_module('spot_async', run_name='__main__')", *given[3:]]


def again(run: Path, first: list[str]) -> list[str]:
    """Return the command that continues a run. One that was killed before its first checkpoint is begun again."""
    if not has_checkpoint(run):
        if run.exists():
            run.rename(run.with_name(f"begun-in-vain-{time.monotonic_ns()}"))
        return first
    return command("train", "--resume", str(run))


def has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*/manifest.json"))


def weights(run: Path) -> str:
    return hashlib.sha256((run / "student" / "model.safetensors").read_bytes()).hexdigest()


def rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def show(runs: Sequence[Drilled]) -> None:
    kills = [kill for each in runs for kill in each.kills]
    table = Table("killed", "times", "run ended", "run continued")
    for role, times in Counter(kill.role for kill in kills).most_common():
        ended = sum(kill.is_end for kill in kills if kill.role == role)
        table.add_row(role, str(times), str(ended), str(times - ended))
    console = Console()
    console.print(table)
    strict = [each for each in runs if each.is_equal is not None]
    console.print(
        f"{len(kills)} kills in {len(runs)} runs: verify-run was clean {sum(each.checks for each in runs)} times; "
        f"{sum(each.is_equal is True for each in strict)} of {len(strict)} strict runs have the weights "
        "of the run that nobody killed"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DrillError as error:
        sys.exit(str(error))
