"""Runs the five methods over simulated servers with faults, for many seeds.

    python simulated_methods.py --seeds 2000 --processes 2     look for a seed that fails
    python simulated_methods.py --seeds 2000 --plays           ... over turns with an environment that has faults too
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

from faults.invariants import require
from faults.plan import MOST_FAULTS, AnswersFault, Fault, planned_answers, planned_faults
from faults.run import FaultyRun, faulty_run
from shrunk import shrunk

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
Run = Callable[[int, Sequence[Fault] | None], FaultyRun]


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


def failure(seed: int, faults: Sequence[Fault] | None = None, run: Run = run) -> Exception | None:
    """Return what is wrong with a run; None if all is well."""
    try:
        run(seed, faults)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a run
        return error
    return None


def explained(seed: int, most: int = MOST_FAULTS, *, plays: bool = False) -> str:
    """Return how a seed fails with as few of its faults as possible, and how to replay that; empty if it does not."""
    plan, own_run = (planned_answers, played) if plays else (planned_faults, run)
    planned = plan(seed, most)
    if failure(seed, planned, own_run) is None:
        return ""
    needed = shrunk(planned, lambda faults: failure(seed, faults, own_run) is not None)
    error = failure(seed, needed, own_run)
    numbers = ",".join(str(fault.number) for fault in needed) or "none"
    how = "; ".join(getattr(error, "__notes__", ()))
    again = f"--seed {seed} --most {most} --faults {numbers}{' --plays' if plays else ''}"
    return f"{type(error).__name__}: {error}\n{how}\n  python {__file__} {again}"


def failures(most: int, plays: bool, seeds: Iterable[int]) -> dict[int, str]:
    """Return how each of these seeds fails, if it does."""
    return {seed: how for seed in seeds if (how := explained(seed, most, plays=plays))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--most", type=int, default=MOST_FAULTS, help="the most faults of a run")
    parser.add_argument("--seed", type=int, help="replay this one, and show where it fails")
    parser.add_argument("--faults", help="numbers of its faults, as 0,3, or none; without this all of them")
    parser.add_argument("--plays", action="store_true", help="over turns with an environment, which has faults too")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed, given.most, given.faults, given.plays)
    seeds = range(given.first, given.first + given.seeds)
    shards = [seeds[i : i + 50] for i in range(0, len(seeds), 50)]
    wrong = 0
    with get_context("spawn").Pool(given.processes) as pool:
        for found in pool.imap(partial(failures, given.most, given.plays), shards):
            for seed, how in found.items():
                wrong += 1
                sys.stdout.write(f"seed {seed}: {how}\n")
    sys.stdout.write(f"{len(seeds)} seeds from {given.first}: {wrong} failed\n")
    return 1 if wrong else 0


def _replay(seed: int, most: int, numbers: str | None, plays: bool) -> int:
    plan, own_run = (planned_answers, played) if plays else (planned_faults, run)
    faults = plan(seed, most)
    if numbers is not None:
        wanted = [int(number) for number in numbers.split(",") if number != "none"]
        faults = [fault for fault in faults if fault.number in wanted]
    try:
        found = own_run(seed, faults)
    except Exception:  # noqa: BLE001 - shown
        traceback.print_exc()
        return 1
    states = Counter({state.value: number for state, number in found.run.orchestrator.book.counts.items() if number})
    ended = (f"{found.seconds:.1f} s", str(dict(states)), str(found.error or "no error"))
    sys.stdout.write("\n".join([*found.struck.values(), *ended]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
