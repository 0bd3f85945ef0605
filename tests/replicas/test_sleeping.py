"""A student's server on the trainer's devices: it sleeps while the trainer trains. The orchestrator on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from spot_async.base.tasks import leaves
from spot_async.errors import TrainerError, TransientError
from spot_async.policies.opd import OpdPolicy
from spot_async.testing.services import SimulatedStudent, SimulatedTrainer
from spot_async.testing.simulation import make_policy, make_run


def made(student, trainer, sleepers):
    return make_run(
        make_policy(OpdPolicy), student=student, trainer=trainer, sleepers=sleepers, iterations=3, batch_size=4
    )


@dataclass
class SleepingStudent(SimulatedStudent):
    """Shares its devices with the trainer, and is as unforgiving as real servers are."""

    is_awake: bool = True
    has_weights: bool = True
    running: int = 0
    events: list = field(default_factory=list)

    async def generate(self, *args, **rest):
        assert self.is_awake
        self.running += 1
        try:
            return await super().generate(*args, **rest)
        finally:
            self.running -= 1

    async def update_weights(self, snapshot, *, deadline):
        assert self.has_weights
        assert not self.is_awake  # its cache has no room yet, nor does anything ask it
        await super().update_weights(snapshot, deadline=deadline)
        self.events.append(f"update {snapshot.version.step}")

    async def sleep(self, *, deadline):
        assert self.running == 0
        await asyncio.sleep(0.5)
        self.is_awake = self.has_weights = False
        self.events.append("sleep")

    async def wake_weights(self, *, deadline):
        await asyncio.sleep(0.5)
        self.has_weights = True
        self.events.append("wake weights")

    async def wake(self, *, deadline):
        await asyncio.sleep(0.5)
        self.is_awake = self.has_weights = True
        self.events.append("wake")


def sharing(student, error=None):
    """A trainer that needs the devices to itself, and fails at its second batch where told to."""

    class Sharing(SimulatedTrainer):
        async def train(self, iteration, batch):
            assert not student.is_awake
            student.events.append("train")
            if error is not None and iteration == 1:
                raise error
            return await super().train(iteration, batch)

    return Sharing()


def test_a_student_that_shares_devices_sleeps_while_the_trainer_trains_and_wakes_before_it_is_asked_again():
    student = SleepingStudent()
    made(student, sharing(student), [student]).finish()
    assert student.events == [
        each for step in (1, 2, 3) for each in ("sleep", "train", "wake weights", f"update {step}", "wake")
    ]


def test_sleep_changes_nothing_but_time():
    def responses(student, trainer, sleepers):
        return [each.response_ids.tolist() for each in made(student, trainer, sleepers).finish().trained]

    sleeping = SleepingStudent()
    assert responses(sleeping, sharing(sleeping), [sleeping]) == responses(SimulatedStudent(), SimulatedTrainer(), [])


@pytest.mark.parametrize("ended", [False, True])
def test_a_student_is_woken_also_when_training_fails_and_that_failure_is_what_is_told(ended):
    class Student(SleepingStudent):
        async def wake(self, *, deadline):
            await super().wake(deadline=deadline)
            if ended and self.events.count("wake") == 2:
                raise TransientError("connection refused")

    student = Student()
    trainer = sharing(student, error=TrainerError("the loss is not finite"))
    with pytest.raises(ExceptionGroup) as stopped:
        made(student, trainer, [student]).finish()
    assert [type(error) for error in leaves(stopped.value)] == [TrainerError]
    assert student.events[-3:] == ["sleep", "train", "wake"]


def test_a_student_that_cannot_be_put_to_sleep_ends_the_run_awake():
    class Student(SleepingStudent):
        async def sleep(self, *, deadline):
            await super().sleep(deadline=deadline)
            raise TransientError("the server says no")

    student = Student()
    trainer = sharing(student)
    with pytest.raises(ExceptionGroup) as stopped:
        made(student, trainer, [student]).finish()
    assert "the server says no" in str(leaves(stopped.value)[0])
    assert student.is_awake
    assert not trainer.batches
