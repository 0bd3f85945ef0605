"""Runs a policy over simulated servers through crashes of the whole run, and checks that nothing is lost or done twice.

    crashing_run(17, lambda: make_policy(MyPolicy), max_staleness=1)

A run has several lives. Each one begins as `train --resume` does: at the newest checkpoint that is whole, with what the
disk kept. Ledger, manifests, rollback and the files of the run are the real ones, on a `CrashingDisk`.

A strict run ends with the weights of one that never crashed, unless a fault decided otherwise: prompts died or were not
paid for, and others took their places; or responses got no verdict, and were left out.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
from faults.invariants import require
from faults.plan import Fault, explained
from faults.stateful_trainer import scratch_directory

from crashes.disk import Crash, CrashingDisk
from crashes.loop import CrashingLoop
from crashes.plan import DiskFault, DiskFaultKind, PlannedFault, life_of, planned_crashes
from crashes.resumed_drill import MAY_END, ResumedDrill, Witness
from spot_async.base.seeds import derive_seed
from spot_async.config import FollowsConfig
from spot_async.errors import DataError, SpotError
from spot_async.protocols import Policy
from spot_async.run_directory import manifest
from spot_async.run_directory.manifest import Checkpoint

MOST_LIVES = 8


@dataclass(frozen=True)
class CrashingRun:
    """A run that came to its end."""

    witness: Witness
    lives: Sequence[str]  # what each of them came to


def crashing_run(
    seed: int,
    policy: Callable[[], Policy],
    *,
    max_staleness: int = 0,
    faults: Sequence[PlannedFault] | None = None,
    follows: FollowsConfig | None = None,
    refill_at_most: int | None = None,
) -> CrashingRun:
    """Run what `policy` makes in every life, through the faults that the seed plans or through `faults` of these.

    Raises what is wrong: `InvariantError`, `DeadlockError`, or any bug.
    """
    faults = planned_crashes(seed) if faults is None else faults
    found = _through_lives(seed, policy, max_staleness, faults, follows, refill_at_most)
    if max_staleness == 0 and faults and not found.witness.is_disturbed:
        undisturbed = _through_lives(seed, policy, max_staleness, (), follows, refill_at_most)
        same = found.witness.line.weights == undisturbed.witness.line.weights
        require(same, "I10", f"it has other weights than without crashes, after {'; '.join(found.lives)}")
    return found


def _through_lives(
    seed: int,
    policy: Callable[[], Policy],
    max_staleness: int,
    faults: Sequence[PlannedFault],
    follows: FollowsConfig | None,
    refill_at_most: int | None,
) -> CrashingRun:
    witness = Witness()
    told: list[str] = []
    with scratch_directory() as scratch, structlog.testing.capture_logs():
        disk = CrashingDisk(scratch, random.Random(derive_seed(seed, "disk")))
        for number in range(MOST_LIVES):
            strikes = [each for each in faults if life_of(each) == number]
            life = _Life(number, seed, policy, max_staleness, strikes, disk, witness, follows, refill_at_most)
            try:
                told.append(life.live())
            except Exception as error:
                error.add_note(f"  in life {number + 1}, after {'; '.join(told) or 'nothing'}; {life.struck}")
                raise
            if life.is_last:
                return CrashingRun(witness, told)
    raise AssertionError(f"it does not end: {'; '.join(told)}")


class _Life:
    """A part of a run, from its beginning to its end or to a crash."""

    def __init__(
        self,
        number: int,
        seed: int,
        policy: Callable[[], Policy],
        max_staleness: int,
        faults: Sequence[PlannedFault],
        disk: CrashingDisk,
        witness: Witness,
        follows: FollowsConfig | None,
        refill_at_most: int | None,
    ) -> None:
        self._follows, self._refill_at_most = follows, refill_at_most
        self.is_last = False
        self._number = number
        self._seed = seed
        self._policy = policy
        self._max_staleness = max_staleness
        self._faults = [each for each in faults if isinstance(each, Fault)]
        self._strikes: dict[DiskFaultKind, DiskFault] = {
            each.kind: each for each in faults if isinstance(each, DiskFault)
        }
        self._crash = self._strikes.get("power cut") or self._strikes.get("kill")
        self._disk = disk
        self._witness = witness
        self._path = disk.path / "run"
        self._drill: ResumedDrill | None = None
        self._loop: CrashingLoop | None = None

    @property
    def struck(self) -> str:
        """What goes wrong with this life, in words."""
        struck = [str(each) for each in self._strikes.values()] if self._drill is None else self._drill.struck()
        return "; ".join(struck) or "no faults"

    def live(self) -> str:
        """Return what the life came to."""
        checkpoint = self._newest()
        crash = self._crash
        self._arm_disk(iterations=0)
        if "bad commit" in self._strikes:
            self._disk.renamed = self._damage_commit
        error: SpotError | None = None
        is_crash = False
        try:
            with self._disk, ExitStack() as stack:
                error = self._run(checkpoint, stack)
        except Crash:
            is_crash = True
        except SpotError as failure:
            words = [str(each) for each in self._strikes.values()]
            require(explained(failure, words, MAY_END), "I8", f"no fault explains the end: {failure!r}")
            error = failure
        if "verdicts" in self.struck:
            self._witness.is_disturbed = True
        loses_power = is_crash and crash is not None and crash.kind == "power cut"
        self._disk.begin_life(loses_power=loses_power)
        if loses_power:
            self._witness.lose_power()
        if self._drill is not None and not is_crash and error is None and self._drill.is_over:
            self._drill.check_end_of_run()
            self.is_last = True
        if "bad newest" in self._strikes:
            self._damage_newest()
        return str(crash) if is_crash else f"{error or 'its end'}"

    def _run(self, checkpoint: Checkpoint | None, stack: ExitStack) -> SpotError | None:
        """Return what ended the run early, if anything did."""
        drill = self._drill = ResumedDrill(
            self._seed,
            self._policy(),
            self._max_staleness,
            self._faults,
            self._witness,
            self._strikes,
            self._arm,
            self._follows,
            self._refill_at_most,
        )
        drill.begin(self._path, checkpoint, stack)
        if drill.trainer.step >= drill.iterations:  # it crashed behind its last checkpoint
            return None
        loop = self._loop = CrashingLoop(derive_seed(self._seed, "order", self._number), self._end_process)
        self._arm_loop(iterations=0)
        return loop.run(drill.run((), ())).error

    def _newest(self) -> Checkpoint | None:
        """Return where this life begins. Without a whole checkpoint the run begins anew."""
        least = max(self._witness.commits, default=0)
        try:
            if manifest.committed(self._path):
                found = manifest.newest(self._path)
                step = found.manifest.step
                require(step >= least, "I10", f"checkpoint {least} was committed, and the run continues from {step}")
                return found
        except DataError as error:
            require("no checkpoint is whole" in str(error), "I10", str(error))
        require(not least, "I10", f"checkpoint {least} was committed, and is gone")
        shutil.rmtree(self._path, ignore_errors=True)
        self._disk.take_as_flushed()
        self._witness.begin_anew()
        return None

    def _arm_disk(self, *, iterations: int) -> None:
        """Let the disk strike as planned from so many iterations of this life on."""
        full, crash, disk = self._strikes.get("full"), self._crash, self._disk
        if full is not None and full.after == iterations and full.change is not None:
            disk.full_from = disk.changes + full.change
        if crash is not None and crash.after == iterations and crash.change is not None:
            disk.crash_at = disk.changes + crash.change

    def _arm_loop(self, *, iterations: int) -> None:
        crash, loop = self._crash, self._loop
        if crash is not None and crash.after == iterations and crash.step is not None and loop is not None:
            loop.crash_at = loop.steps + crash.step

    def _arm(self, iterations: int) -> None:
        self._arm_disk(iterations=iterations)
        self._arm_loop(iterations=iterations)

    def _end_process(self) -> None:
        self._disk.freeze()
        raise Crash

    def _damage_commit(self, path: Path) -> None:
        if path.name == manifest.FILE:
            self._disk.renamed = lambda path: None
            self._witness.damaged.add(manifest.step_of(path.parent))
            self._disk.damage(sorted(path.parent.glob("rank-*"))[-1])

    def _damage_newest(self) -> None:
        found = manifest.committed(self._path)
        for directory in found[:1]:
            files = sorted(directory.iterdir())
            self._disk.damage(files[self._seed % len(files)])
            self._witness.damaged.add(manifest.step_of(directory))
        # Others may have been pruned while this one was whole.
        left = {manifest.step_of(each) for each in found[1:]}
        self._witness.commits = [each for each in self._witness.commits if each in left]
