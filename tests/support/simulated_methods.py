"""Runs the five methods over simulated servers with faults, for many seeds.

    python simulated_methods.py --seeds 2000 --processes 2     look for a seed that fails
    python simulated_methods.py --seed 17 --faults 0,3         replay one, with two of its faults

The seed decides the method and the staleness too. Each failing seed is shrunk to the faults that it needs, and printed
as the line that replays it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import get_context

from faults.plan import MOST_FAULTS, Fault, planned_faults
from faults.run import FaultyRun, faulty_run
from shrunk import shrunk

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
STALENESS = (0, 1, 2)


def run(seed: int, faults: Sequence[Fault] | None = None, **more: object) -> FaultyRun:
    method, max_staleness = METHODS[seed % 5], STALENESS[seed // 5 % 3]
    return faulty_run(seed, method(), max_staleness=max_staleness, faults=faults, **more)  # type: ignore[arg-type]


def failure(seed: int, faults: Sequence[Fault] | None = None) -> Exception | None:
    """Return what is wrong with a run; None if all is well."""
    try:
        run(seed, faults)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a run
        return error
    return None


def explained(seed: int, most: int = MOST_FAULTS) -> str:
    """Return how a seed fails with as few of its faults as possible, and how to replay that; empty if it does not."""
    planned = planned_faults(seed, most)
    if failure(seed, planned) is None:
        return ""
    needed = shrunk(planned, lambda faults: failure(seed, faults) is not None)
    error = failure(seed, needed)
    numbers = ",".join(str(fault.number) for fault in needed) or "none"
    how = "; ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}\n{how}\n  python {__file__} --seed {seed} --most {most} --faults {numbers}"


def failures(most: int, seeds: Iterable[int]) -> dict[int, str]:
    """Return how each of these seeds fails, if it does."""
    return {seed: how for seed in seeds if (how := explained(seed, most))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--most", type=int, default=MOST_FAULTS, help="the most faults of a run")
    parser.add_argument("--seed", type=int, help="replay this one, and show where it fails")
    parser.add_argument("--faults", help="numbers of its faults, as 0,3, or none; without this all of them")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.most, given.faults)
    seeds = range(given.first, given.first + given.seeds)
    shards = [seeds[i : i + 50] for i in range(0, len(seeds), 50)]
    wrong = 0
    with get_context("spawn").Pool(given.processes) as pool:
        for found in pool.imap(partial(failures, given.most), shards):
            for seed, how in found.items():
                wrong += 1
                sys.stdout.write(f"seed {seed}: {how}\n")
    sys.stdout.write(f"{len(seeds)} seeds from {given.first}: {wrong} failed\n")
    return 1 if wrong else 0


def _replay(seed: int, most: int, numbers: str | None) -> int:
    faults = planned_faults(seed, most)
    if numbers is not None:
        wanted = [int(number) for number in numbers.split(",") if number != "none"]
        faults = [fault for fault in faults if fault.number in wanted]
    try:
        found = run(seed, faults)
    except Exception:  # noqa: BLE001 - shown
        traceback.print_exc()
        return 1
    states = Counter({state.value: number for state, number in found.run.orchestrator.book.counts.items() if number})
    ended = (f"{found.seconds:.1f} s", str(dict(states)), str(found.error or "no error"))
    sys.stdout.write("\n".join([*found.struck.values(), *ended]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
