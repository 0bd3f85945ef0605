"""Runs the five methods through crashes of the whole run, for many seeds: nothing is lost, and nothing done twice.

    python simulated_crashes.py --seeds 100000 --state soak.json   look for seeds that fail
    python simulated_crashes.py --seed 17 --faults 0,101           replay one, with two of its faults

The seed decides the method and the staleness too. Each failing seed is shrunk to the faults that it needs, and printed
as the line that replays it. With a state file the search continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path

from crashes.plan import PlannedFault, planned_crashes
from crashes.run import CrashingRun, crashing_run
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from shrunk import shrunk
from simulated_methods import METHODS, STALENESS

from spot_async.base.processes.resources import tune_gc

SHARD = 50  # seeds
Shards = dict[int, dict[int, str]]  # by the first seed: the seeds that failed, and how


def run(seed: int, faults: Sequence[PlannedFault] | None = None) -> CrashingRun:
    return crashing_run(seed, METHODS[seed % 5], max_staleness=STALENESS[seed // 5 % 3], faults=faults)


def failure(seed: int, faults: Sequence[PlannedFault] | None = None) -> Exception | None:
    """Return what is wrong with a run; None if all is well."""
    try:
        run(seed, faults)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a run
        return error
    return None


def explained(seed: int) -> str:
    """Return how a seed fails with as few of its faults as possible, and how to replay that; empty if it does not."""
    planned = planned_crashes(seed)
    if failure(seed, planned) is None:
        return ""
    needed = shrunk(planned, lambda faults: failure(seed, faults) is not None)
    error = failure(seed, needed)
    numbers = ",".join(str(fault.number) for fault in needed) or "none"
    how = "; ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}\n{how}\n  python {__file__} --seed {seed} --faults {numbers}"


def shard(first: int) -> tuple[int, dict[int, str]]:
    return first, {seed: how for seed in range(first, first + SHARD) if (how := explained(seed))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help=f"how many, in steps of {SHARD}")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--state", type=Path, help="keeps what is done, so that the search can be stopped")
    parser.add_argument("--seed", type=int, help="replay this one, and show where it fails")
    parser.add_argument("--faults", help="numbers of its faults, as 0,101, or none; without this all of them")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.faults)
    done = _read(given.state)
    firsts = range(given.first, given.first + given.seeds, SHARD)
    with get_context("spawn").Pool(given.processes, initializer=tune_gc) as pool:
        found = pool.imap_unordered(shard, [first for first in firsts if first not in done])
        _collect(found, firsts, done, given.state)
    wrong = sum(len(done[first]) for first in firsts)
    sys.stdout.write(f"{len(firsts) * SHARD} seeds from {given.first}: {wrong} failed\n")
    return 1 if wrong else 0


def _collect(
    found: Iterable[tuple[int, dict[int, str]]], firsts: Sequence[int], done: Shards, state: Path | None
) -> None:
    """Show and keep what comes in, until all of it is there."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("seeds, {task.fields[wrong]} failed"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        known = [done[first] for first in firsts if first in done]
        wrong = sum(map(len, known))
        task = progress.add_task("", total=len(firsts) * SHARD, completed=len(known) * SHARD, wrong=wrong)
        for first, failed in found:
            done[first] = failed
            for seed, how in failed.items():
                progress.console.print(f"seed {seed}: {how}", markup=False, highlight=False, soft_wrap=True)
            wrong += len(failed)
            progress.update(task, advance=SHARD, wrong=wrong)
            if state is not None:
                _write(state, done)


def _read(state: Path | None) -> Shards:
    if state is None or not state.exists():
        return {}
    found = json.loads(state.read_text())
    return {int(first): {int(seed): how for seed, how in failed.items()} for first, failed in found.items()}


def _write(state: Path, done: Shards) -> None:
    """Replace the file, so that a kill leaves a whole one."""
    new = state.with_name(f"{state.name}.new")
    new.write_text(json.dumps(done))
    new.replace(state)


def _replay(seed: int, numbers: str | None) -> int:
    faults = planned_crashes(seed)
    if numbers is not None:
        wanted = [int(number) for number in numbers.split(",") if number != "none"]
        faults = [fault for fault in faults if fault.number in wanted]
    try:
        found = run(seed, faults)
    except Exception:  # noqa: BLE001 - shown
        traceback.print_exc()
        return 1
    sys.stdout.write("\n".join(f"life {number}: {life}" for number, life in enumerate(found.lives, start=1)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
