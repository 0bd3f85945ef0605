"""A teacher that follows the student: each of its answers is of what it should have then, whatever befalls the run."""

from __future__ import annotations

import re

import msgspec
import pytest
from crashes.run import crashing_run
from faults.run import faulty_run
from following_teacher import FollowingTeacher
from only_teacher import only

from spot_async.config import FollowsConfig
from spot_async.loop.publishing import WeightPublisher
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.running import checkpoints
from spot_async.stages.stage import UpdatePause
from spot_async.testing.services import SimulatedTrainer, token_scores
from spot_async.testing.simulation import make_policy, simulated_run
from spot_async.trainer.feed_check import teacher_versions
from spot_async.types import WeightSnapshot, WeightVersion

WAYS = {"live": FollowsConfig(every=1), "lagged": FollowsConfig(every=2), "averaged": FollowsConfig(decay=0.9)}


class TeachersTrainer(SimulatedTrainer):
    """A trainer with a teacher that follows the student."""

    def __init__(self, follows):
        super().__init__()
        self.follows = follows

    async def train(self, iteration, batch):
        report, had = await super().train(iteration, batch), self.follows.step_at(iteration + 1)
        snapshot = WeightSnapshot(directory=f"weights/teacher/{had}", version=WeightVersion(0, had))
        return msgspec.structs.replace(report, teachers={"teacher": snapshot} if had else {})


def policy():
    return make_policy(EopdPolicy, top_k=8)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_each_term_names_what_the_teacher_had_and_lags_no_more_than_it_may(way, max_staleness):
    follows, teacher = WAYS[way], FollowingTeacher()
    run = simulated_run(
        policy(),
        teachers=only(teacher),
        trainer=TeachersTrainer(follows),
        following=["teacher"],
        teacher_sinks={"teacher": teacher},
        teacher_lag=follows.longest_lag,
        max_staleness=max_staleness,
        iterations=6,
        batch_size=4,
    )
    found = [{version.step for each in batch for version in teacher_versions(each)} for batch in run.batches]
    for step, versions in enumerate(found):
        assert versions <= {follows.step_at(max(0, step - n)) for n in range(max_staleness + 1)}
    assert set().union(*found) >= {0, 2}
    assert all(len(each.pulls) == len(each.soft_targets) == 1 for batch in run.batches for each in batch)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_students_own_servers_answer_as_the_live_teacher(max_staleness):
    student = FollowingTeacher()  # which writes as a student does
    run = simulated_run(
        policy(),
        student=student,
        teachers=only(student),
        following=["teacher"],
        max_staleness=max_staleness,
        iterations=4,
    )
    for step, batch in enumerate(run.batches):
        versions = {version.step for each in batch for version in teacher_versions(each)}
        assert versions <= set(range(step - max_staleness, step + 1))


def test_a_frozen_teachers_terms_name_no_version_whatever_its_server_says():
    run = simulated_run(policy(), iterations=2)
    assert [teacher_versions(each) for each in run.trained] == [set()] * 32
    assert token_scores([0.0]).version is not None


SEEDS = range(60)


@pytest.mark.parametrize(
    ("max_staleness", "seeds"),
    [
        (1, SEEDS[:20]),
        pytest.param(1, SEEDS[20:], marks=pytest.mark.long),
        *(pytest.param(staleness, SEEDS, marks=pytest.mark.nightly) for staleness in (0, 2)),
    ],
)
def test_invariants_hold_with_a_teacher_that_follows_whatever_befalls_the_run(max_staleness, seeds):
    ways = list(WAYS.values())
    runs = [faulty_run(seed, policy(), max_staleness=max_staleness, follows=ways[seed % 3]).run for seed in seeds]
    named = {version.step for run in runs for each in run.trained for version in teacher_versions(each)}
    assert named >= {0, 1, 2, 3}


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_crashes_lose_nothing_and_a_strict_run_keeps_its_bits(max_staleness):
    ways = list(WAYS.values())
    found = [crashing_run(seed, policy, max_staleness=max_staleness, follows=ways[seed % 3]) for seed in range(18)]
    resumed = [each.witness for each in found if len(each.lives) > 1]
    assert len(resumed) > 6
    assert not all(witness.is_disturbed for witness in resumed)


@pytest.mark.parametrize(
    ("version", "kept"),
    [
        (WeightVersion(0, 2), WeightVersion(1, 2)),  # named as the newest lineage's
        (WeightVersion(0, 1), WeightVersion(1, 1)),
        (WeightVersion(0, 0), None),  # too old by the time of its batch
        (WeightVersion(0, 3), None),  # of the part that was cut off
    ],
)
def test_a_resumed_run_uses_samples_again_whose_teacher_still_counts(version, kept):
    """The run began again at step 2; the sample's batch may be of a student of step 2, and of a teacher one older."""
    run = simulated_run(policy(), iterations=1, batch_size=2)
    (first, *_) = run.samples
    each = msgspec.structs.replace(
        first.supervision,
        version=WeightVersion(0, 2),
        version_spans=(),
        pulls=tuple(msgspec.structs.replace(pull, version=version) for pull in first.supervision.pulls),
    )
    again = checkpoints._renamed(msgspec.structs.replace(first, supervision=each), (0, 2), 2, 1)
    assert (None if again is None else teacher_versions(again.supervision)) == (None if kept is None else {kept})


# Each of these breaks the code on purpose.


def change_without_a_pause(monkeypatch):
    async def enter(pause):
        return None

    monkeypatch.setattr(UpdatePause, "enter", enter)
    monkeypatch.setattr(UpdatePause, "leave", lambda pause: None)


def leave_the_teacher_behind(monkeypatch):
    offer = WeightPublisher.offer

    def without(publisher, iteration, report, written):
        offer(publisher, iteration, report, written)
        publisher._waiting[-1] = publisher._waiting[-1]._replace(teachers={})

    monkeypatch.setattr(WeightPublisher, "offer", without)


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (change_without_a_pause, "gets weights with .* requests in flight|I15"),
        (leave_the_teacher_behind, "the teacher that follows the student was asked with weights|I15"),
    ],
)
def test_a_run_that_asks_a_teacher_wrongly_is_noticed(fault, noticed, monkeypatch):
    fault(monkeypatch)

    def said(seed):
        try:
            faulty_run(seed, make_policy(OpdPolicy), max_staleness=seed % 3, follows=WAYS["averaged"])
        except BaseException as error:  # noqa: BLE001 - whatever is wrong with a run
            return f"{error!r} {getattr(error, 'exceptions', '')}"
        return ""

    assert any(re.search(noticed, said(seed)) for seed in range(40))
