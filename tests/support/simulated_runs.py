"""Runs the five methods over simulated servers while things go wrong, for many seeds.

    python simulated_runs.py faults --seeds 2000 --processes 2      look for seeds that fail
    python simulated_runs.py turns --seeds 2000                     of runs with an environment that has faults too
    python simulated_runs.py crashes --seeds 100000 --state s.json  of runs that crash, and lose and repeat nothing
    python simulated_runs.py crashes --seed 17 --faults 0,101       replay one, with two of its faults

The seed decides the method and the staleness too. Each failing seed is shrunk to the faults that it needs, and printed
as the line that replays it. With a state file the search continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from crashes.plan import PlannedFault, planned_crashes
from crashes.run import CrashingRun, crashing_run
from faults.invariants import require
from faults.plan import AnswersFault, Fault, planned_answers, planned_faults
from faults.run import FaultyRun, faulty_run
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from shrunk import shrunk

from spot_async.base.processes.resources import tune_gc
from spot_async.policies.distill import DistillPolicy
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.protocols import Policy
from spot_async.testing.simulation import make_policy, policy_context

METHODS: tuple[Callable[[], Policy], ...] = (
    lambda: make_policy(SpotPolicy, positions=2, probe_top_k=2, score_top_k=8, baseline=0.5),
    lambda: make_policy(OpdPolicy),
    lambda: make_policy(EopdPolicy, top_k=8),
    lambda: make_policy(GrpoPolicy, policy_context(reference_kl=True), samples=4),
    lambda: make_policy(KdPolicy),
)
PLAYING = (*METHODS[:4], lambda: make_policy(DistillPolicy, support="student", top_k=8, divergence="reverse_kl"))
STALENESS = (0, 1, 2)
SHARD = 50  # seeds
Shards = dict[int, dict[int, str]]  # by the first seed: the seeds that failed, and how


def run(seed: int, faults: Sequence[Fault] | None = None, **more: object) -> FaultyRun:
    method, max_staleness = METHODS[seed % 5], STALENESS[seed // 5 % 3]
    return faulty_run(seed, method(), max_staleness=max_staleness, faults=faults, **more)  # type: ignore[arg-type]


def played(seed: int, faults: Sequence[Fault] | None = None) -> FaultyRun:
    """Run over turns with an environment, twice. Raises `InvariantError` if one of these does not hold:

    I17 a seed means one run; and with n = 0, answers that failed and came after all change nothing in it
    """
    method, max_staleness = PLAYING[seed % 5], STALENESS[seed // 5 % 3]
    faults = planned_answers(seed) if faults is None else faults

    def once(faults: Sequence[Fault]) -> FaultyRun:
        return faulty_run(seed, method(), max_staleness=max_staleness, faults=faults, plays=True)

    found, again = once(faults), once(faults)
    is_same = (found.seconds, found.weights) == (again.seconds, again.weights)
    require(is_same, "I17", "another run of the same seed is another run")
    only_answers = all(isinstance(fault, AnswersFault) for fault in faults)
    if faults and only_answers and max_staleness == 0 and not found.error and not found.run.journal.dead:
        require(found.weights == once(()).weights, "I17", "its weights are others than without faults")
    return found


def told(found: FaultyRun) -> list[str]:
    """Return what happened in a run, line by line."""
    states = Counter({state.value: number for state, number in found.run.orchestrator.book.counts.items() if number})
    ended = (f"{found.seconds:.1f} s", str(dict(states)), str(found.error or "no error"))
    return [*found.struck.values(), *ended]


def crashed(seed: int, faults: Sequence[PlannedFault] | None = None) -> CrashingRun:
    return crashing_run(seed, METHODS[seed % 5], max_staleness=STALENESS[seed // 5 % 3], faults=faults)


def lives_told(found: CrashingRun) -> list[str]:
    return [f"life {number}: {life}" for number, life in enumerate(found.lives, start=1)]


class Kind(NamedTuple):
    """Runs of a kind: what goes wrong in them by the seed, and what happened in one that came to its end."""

    name: str
    plan: Callable[[int], Sequence[Any]]
    run: Callable[[int, Sequence[Any] | None], Any]
    told: Callable[[Any], Iterable[str]]

    def failure(self, seed: int, faults: Sequence[Any] | None = None) -> Exception | None:
        """Return what is wrong with a run; None if all is well."""
        try:
            self.run(seed, faults)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a run
            return error
        return None

    def explained(self, seed: int) -> str:
        """Return how a seed fails with as few of its faults as possible, and how to replay that. Empty: it does not."""
        planned = self.plan(seed)
        if self.failure(seed, planned) is None:
            return ""
        needed = shrunk(planned, lambda faults: self.failure(seed, faults) is not None)
        error = self.failure(seed, needed)
        numbers = ",".join(str(fault.number) for fault in needed) or "none"
        how = "; ".join(getattr(error, "__notes__", ()))
        again = f"{self.name} --seed {seed} --faults {numbers}"
        return f"{type(error).__name__}: {error}\n{how}\n  python {__file__} {again}"

    def replayed(self, seed: int, numbers: str | None) -> int:
        """Show what happens in a run, with all its faults or with those of these numbers. Return the exit code."""
        faults = self.plan(seed)
        if numbers is not None:
            wanted = [int(number) for number in numbers.split(",") if number != "none"]
            faults = [fault for fault in faults if fault.number in wanted]
        try:
            found = self.run(seed, faults)
        except Exception:  # noqa: BLE001 - shown
            traceback.print_exc()
            return 1
        sys.stdout.write("\n".join(self.told(found)) + "\n")
        return 0


FAULTS = Kind("faults", planned_faults, run, told)
TURNS = Kind("turns", planned_answers, played, told)
CRASHES = Kind("crashes", planned_crashes, crashed, lives_told)
KINDS = {each.name: each for each in (FAULTS, TURNS, CRASHES)}


def shard(kind: str, first: int) -> tuple[int, dict[int, str]]:
    return first, {seed: how for seed in range(first, first + SHARD) if (how := KINDS[kind].explained(seed))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seeds", type=int, default=2000, help=f"how many, in steps of {SHARD}")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--state", type=Path, help="keeps what is done, so that the search can be stopped")
    parser.add_argument("--seed", type=int, help="replay this one, and show where it fails")
    parser.add_argument("--faults", help="numbers of its faults, as 0,101, or none; without this all of them")
    given = parser.parse_args()
    if given.seed is not None:
        return KINDS[given.kind].replayed(given.seed, given.faults)
    done = _read(given.state)
    firsts = range(given.first, given.first + given.seeds, SHARD)
    with get_context("spawn").Pool(given.processes, initializer=tune_gc) as pool:
        found = pool.imap_unordered(partial(shard, given.kind), [first for first in firsts if first not in done])
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


if __name__ == "__main__":
    sys.exit(main())
