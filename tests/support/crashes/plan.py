"""Plans how a simulated run ends before its time, and what goes wrong with its disk.

A run has several lives. In each of the first ones its process may be killed or lose its power, at a step of any task
or at a change of its disk. The disk may be full, and a checkpoint may turn out damaged. Servers have their faults too
(`faults.plan`). The last life has none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from faults.plan import Fault

from spot_async.base.seeds import derive_seed

MOST_LIVES_WITH_FAULTS = 4
MOST_FAULTS_OF_SERVERS = 2  # in a life
NUMBERS_OF_A_LIFE = 100  # the numbers of its faults begin at this times its number
MOST_STEPS, MOST_CHANGES = 150, 60  # of an iteration

# The process is killed; the power is lost; nothing fits on the disk any more. Or a checkpoint is damaged: as soon as it
# is committed, or the newest one after the life.
DiskFaultKind = Literal["kill", "power cut", "full", "bad commit", "bad newest"]
SHARES: dict[DiskFaultKind, float] = {"kill": 4, "power cut": 5, "full": 2, "bad commit": 1, "bad newest": 1}


@dataclass(frozen=True)
class DiskFault:
    """One thing that goes wrong with a life or its disk. `number` is its place in the plan of its run."""

    number: int
    kind: DiskFaultKind
    after: int  # so many iterations of this life; from there on steps and changes are counted
    step: int | None  # of the event loop
    change: int | None  # of the disk

    def __str__(self) -> str:
        step = "" if self.step is None else f" at step {self.step}"
        change = "" if self.change is None else f" at change {self.change}"
        after = f" after iteration {self.after} of its life" if self.after else ""
        return f"{self.kind}{step}{change}{after} (fault {self.number})"


PlannedFault: TypeAlias = Fault | DiskFault


def life_of(fault: PlannedFault) -> int:
    """Return the life that a fault strikes; the first one is 0."""
    return fault.number // NUMBERS_OF_A_LIFE


def planned_crashes(seed: int) -> Sequence[PlannedFault]:
    """Return all faults of a run's seed."""
    rng = random.Random(derive_seed(seed, "crashes"))
    found: list[PlannedFault] = []
    for life in range(rng.randint(1, MOST_LIVES_WITH_FAULTS)):
        first = life * NUMBERS_OF_A_LIFE
        servers = rng.choice([0, 0, rng.randint(1, MOST_FAULTS_OF_SERVERS)])
        found += [Fault(first + i, derive_seed(seed, "fault", life, i)) for i in range(servers)]
        kinds = rng.choices([*SHARES], [*SHARES.values()], k=rng.choice([1, 1, 2]))
        found += [_disk_fault(first + servers + i, kind, rng) for i, kind in enumerate(kinds)]
    return found


def _disk_fault(number: int, kind: DiskFaultKind, rng: random.Random) -> DiskFault:
    after = rng.choice([0, 0, 1, 2, 3, 4])
    scale = 1 if after else 4  # before the first iteration comes the start
    at_step, at_change = _moment(rng, MOST_STEPS * scale), _moment(rng, MOST_CHANGES * scale)
    if kind in ("bad commit", "bad newest"):
        return DiskFault(number, kind, 0, None, None)
    if kind != "full" and rng.random() < 0.4:
        return DiskFault(number, kind, after, at_step, None)
    return DiskFault(number, kind, after, None, at_change)


def _moment(rng: random.Random, most: int) -> int:
    """Return a number up to `most`. Half of them are small: most is written as an iteration ends."""
    return rng.randint(1, most) if rng.random() < 0.5 else round(most ** rng.random())
