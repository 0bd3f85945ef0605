"""Whenever a run crashes, and whatever its disk loses, it continues and trains every prompt once.

What breaks that is noticed: mutations show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from crashes.plan import DiskFault
from crashes.run import crashing_run
from faults.plan import Fault
from joined_policy import TakesTurns
from recipes import recipe, simulated_recipe
from simulated_runs import CRASHES

from spot_async.base.seeds import derive_seed
from spot_async.loop.resuming import Resumption, StateSaver
from spot_async.policies.opd import OpdPolicy
from spot_async.run_directory import layout, manifest
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.running import checkpoints
from spot_async.running.checkpoints import RunCheckpoints
from spot_async.telemetry.run_log import SpendingLog
from spot_async.terms import revised, weighted
from spot_async.testing.simulation import make_policy, policy_context

SEEDS = range(300)


# Five shards in a row have one method each.
LONG, NIGHTLY = [pytest.mark.long], [pytest.mark.long, pytest.mark.nightly]
SHARDS = 30
OTHERS = [pytest.param(each, marks=LONG if each % 15 < 5 else NIGHTLY) for each in range(1, SHARDS)]


@pytest.mark.parametrize("shard", [0, *OTHERS])
def test_nothing_is_lost_or_done_twice_however_often_a_run_crashes(shard):
    """A failure is shown with the faults that it needs, and as the line that replays it."""
    assert [how for seed in SEEDS[shard::SHARDS] if (how := CRASHES.explained(seed))] == []


class Remembers(OpdPolicy):
    """Weighs its pulls by the lengths that it was told of."""

    def __init__(self):
        super().__init__(OpdPolicy.Settings(), policy_context())
        self.seen = []

    async def supervise(self, prompt, stages):
        weight = 1 + sum(self.seen) % 1
        samples = await super().supervise(prompt, stages)
        return [revised(each, pulls=(weighted(each.supervision.pulls[0], weight),)) for each in samples]

    def revise(self, batch):
        assert len(self.seen) == batch.iteration
        return batch.samples

    def observe(self, report):
        assert len(self.seen) == report.iteration
        self.seen.append(report.metrics["rollout/tokens"] / 7)

    def state_dict(self):
        return {"seen": [*self.seen]}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def two_teachers():
    return make_policy(recipe("teacher_average"), policy_context(teachers=("large", "small")), top_k=8)


class Kind(NamedTuple):
    """Runs of a policy, of so many seeds: more than `resumed` of them crash and continue."""

    policy: Callable[[], Any]
    seeds: int
    resumed: int = 0
    refill_at_most: int | None = None


KINDS = {
    "two models write in turns": Kind(TakesTurns, 12, 6),
    "a teacher writes on": Kind(partial(simulated_recipe, "speculative_kd"), 6),
    "several teachers": Kind(two_teachers, 4),
    "what it was told decides": Kind(Remembers, 40, 20),
    "batches refill": Kind(partial(make_policy, recipe("dapo"), samples=3), 12, 6, refill_at_most=100),
}


@pytest.mark.parametrize(
    ("kind", "max_staleness"),
    [
        *(pytest.param("two models write in turns", each, marks=LONG) for each in (0, 2)),
        *(pytest.param(each, 0, marks=LONG) for each in ("a teacher writes on", "what it was told decides")),
        *((each, 2) for each in ("a teacher writes on", "what it was told decides")),
        ("several teachers", 0),
        *(("batches refill", each) for each in (0, 1)),
        pytest.param("batches refill", 3, marks=LONG),
    ],
)
def test_nothing_of_a_policys_own_is_lost_either_and_a_strict_run_keeps_its_bits(kind, max_staleness):
    """Strict ones that no fault of a server disturbed are compared with one that never crashed, bit for bit."""
    policy, seeds, more_than, refill_at_most = KINDS[kind]
    given = {"max_staleness": max_staleness, "refill_at_most": refill_at_most}
    found = [crashing_run(seed, policy, **given) for seed in range(seeds)]
    resumed = [each.witness for each in found if len(each.lives) > 1]
    assert len(resumed) > more_than
    assert not all(witness.is_disturbed for witness in resumed)


def kill(life, after, step):
    return DiskFault(100 * life, "kill", after, step, None)


# Samples of a part of the run that was cut off were taken for those of the next part, whose lineage had its number.
CUT_OFF = (7, [kill(0, 1, 42), kill(1, 1, 121), DiskFault(101, "bad newest", 0, None, None)])
# An evaluation ended after the next checkpoint. A power cut took its file, and its weights were gone.
LATE_EVALUATION = (37091, [DiskFault(1, "power cut", 4, 53, None)])
# A prompt that there was no money for comes last in the next life, and no batch is left for it.
PAID_TOO_LATE = (62997, [Fault(0, 2098495906369600860)])
# The newest checkpoint was damaged. While the run went back, a power cut brought one back that had been pruned.
PRUNED = (
    53079,
    [
        DiskFault(1, "kill", 2, 150, None),
        DiskFault(102, "power cut", 0, 76, None),
        DiskFault(200, "bad newest", 0, None, None),
        DiskFault(201, "kill", 0, 506, None),
        DiskFault(300, "power cut", 0, None, 3),
    ],
)
# Somebody restarted a student's server. Asked for candidates, the simulated one said first which weights it holds.
RESTARTED = (98115, [Fault(0, 6680742240523113299), Fault(1, 1671174068226249623)])


@pytest.mark.parametrize(("seed", "faults"), [CUT_OFF, LATE_EVALUATION, PAID_TOO_LATE, PRUNED, RESTARTED])
def test_what_once_went_wrong_does_not_any_more(seed, faults):
    assert CRASHES.failure(seed, faults) is None


# Each of these breaks the code on purpose.


def commit_before_tensors_are_written(monkeypatch):
    finish = StateSaver.finish

    async def hasty(saver, step):
        await saver._checkpoints.commit(step)
        await finish(saver, step)

    monkeypatch.setattr(StateSaver, "finish", hasty)


def commit_before_rows_are_written(monkeypatch):
    begin, finish = StateSaver.begin, StateSaver.finish

    async def at_once(saver, step):
        await begin(saver, step)
        await finish(saver, step)

    async def nothing(saver, step):
        pass

    monkeypatch.setattr(StateSaver, "begin", at_once)
    monkeypatch.setattr(StateSaver, "finish", nothing)


def rename_without_flushing_the_directory(monkeypatch):
    flush = manifest.flush_to_disk
    monkeypatch.setattr(manifest, "flush_to_disk", lambda path: None if path.is_dir() else flush(path))


def rename_what_is_not_flushed(monkeypatch):
    flush = manifest.flush_to_disk
    monkeypatch.setattr(manifest, "flush_to_disk", lambda path: flush(path) if path.is_dir() else None)


def prune_before_verifying(monkeypatch):
    prune = manifest.prune

    def unverified(*arguments, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest, "check", lambda directory: None)
            prune(*arguments, **more)

    monkeypatch.setattr(manifest, "prune", unverified)


def take_a_damaged_checkpoint(monkeypatch):
    check = manifest.check

    def trusting(directory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest, "_described", lambda path: _Equal())
            return check(directory)

    class _Equal:
        def __eq__(self, other):
            return True

    monkeypatch.setattr(manifest, "check", trusting)


def cut_a_batch_without_flushing(monkeypatch):
    transaction = Ledger._transaction
    monkeypatch.setattr(Ledger, "_transaction", lambda ledger, pragma="": transaction(ledger))


def cut_a_batch_after_it_is_trained_on(monkeypatch):
    cut = Ledger.cut

    def late(ledger, *arguments):
        waiting, ledger.__dict__["waiting"] = ledger.__dict__.get("waiting"), arguments
        if waiting is not None:
            cut(ledger, *waiting)

    monkeypatch.setattr(Ledger, "cut", late)


def forget_samples_before_the_commit(monkeypatch):
    commit = RunCheckpoints.commit

    async def hasty(saved, iteration):
        saved.ledger.forget_samples(iteration)
        await commit(saved, iteration)

    monkeypatch.setattr(RunCheckpoints, "commit", hasty)


def keep_no_samples(monkeypatch):
    monkeypatch.setattr(Ledger, "samples", lambda ledger, ordinal: None)


def use_samples_of_weights_that_were_cut_off(monkeypatch):
    monkeypatch.setattr(checkpoints, "_is_ancestor", lambda version, lineages: True)


def leave_samples_their_lineage(monkeypatch):
    monkeypatch.setattr(checkpoints, "_in_lineage", lambda supervision, lineage: supervision)


def forget_who_died(monkeypatch):
    def forgetful(version, settled, *kept):
        return Resumption(version, {each: end for each, end in settled.items() if end != "dead"}, *kept)

    monkeypatch.setattr(checkpoints, "Resumption", forgetful)


def leave_prompts_in_batches_that_were_cut_off(monkeypatch):
    monkeypatch.setattr(Ledger, "roll_back", lambda ledger, step: None)


def leave_rows_that_are_written_again(monkeypatch):
    monkeypatch.setattr(RunDirectory, "cut_after", lambda directory, iteration: None)


def leave_evaluations_that_are_made_again(monkeypatch):
    monkeypatch.setattr(checkpoints, "_move_aside", lambda run, step: None)


def make_evaluations_again_that_count(monkeypatch):
    move = checkpoints._move_aside

    def too_much(run, step):
        move(run, step)
        for path in run.glob(f"evaluation-{step:06d}.json"):
            path.unlink()

    monkeypatch.setattr(checkpoints, "_move_aside", too_much)


def leave_rows_unflushed(monkeypatch):
    monkeypatch.setattr(RunDirectory, "flush_rows", lambda directory: None)


def leave_the_directory_unflushed(monkeypatch):
    monkeypatch.setattr(layout, "flush_to_disk", lambda path: None)


def forget_the_bill(monkeypatch):
    monkeypatch.setattr(SpendingLog, "go_on", lambda log: None)


# How each of them is noticed, and the seed that shows it, with faults where they are not those of its plan.
MUTATIONS = [
    (commit_before_tensors_are_written, "list index out of range|I10", (0, None)),
    (commit_before_rows_are_written, "I12", (7, None)),
    (rename_without_flushing_the_directory, "I10", (7, None)),
    (rename_what_is_not_flushed, "I10", (7, None)),
    (prune_before_verifying, "I10", (9, [kill(0, 2, 50), kill(1, 1, 60), DiskFault(101, "bad commit", 0, None, None)])),
    (take_a_damaged_checkpoint, "I7", (8, None)),
    (cut_a_batch_without_flushing, "I4|I10", (20, None)),
    (cut_a_batch_after_it_is_trained_on, "I10", (0, None)),
    (forget_samples_before_the_commit, "I13", (76, None)),
    (keep_no_samples, "I13", (1, None)),
    (use_samples_of_weights_that_were_cut_off, "I2", CUT_OFF),
    (leave_samples_their_lineage, "supervision of .* another lineage", (1, None)),
    (forget_who_died, "I4", (13, [*(Fault(n, derive_seed(13, "x", n)) for n in range(4)), kill(0, 3, 50)])),
    (leave_prompts_in_batches_that_were_cut_off, "", (9, None)),
    (leave_rows_that_are_written_again, "I12", (9, None)),
    (leave_evaluations_that_are_made_again, "I8|I11", (13, None)),
    (make_evaluations_again_that_count, "I11", (27, None)),
    (leave_rows_unflushed, "I1[124]", (7, None)),
    (leave_the_directory_unflushed, "", (7, None)),
    (forget_the_bill, "I14", (1, None)),
]


@pytest.mark.parametrize(("mutate", "noticed", "shown_by"), MUTATIONS)
def test_a_run_that_loses_or_repeats_something_is_noticed(mutate, noticed, shown_by, monkeypatch):
    mutate(monkeypatch)
    runs = [shown_by, *((seed, None) for seed in range(100))]  # the first one is enough, while seeds mean the same
    found = next((error for seed, faults in runs if (error := CRASHES.failure(seed, faults)) is not None), None)
    assert found is not None
    assert re.match(noticed, str(found)), found
