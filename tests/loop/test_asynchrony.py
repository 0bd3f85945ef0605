"""Runs whose trainer may be ahead of the weights that are served, on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from limits import same_limits

from spot_async.base.tasks import leaves
from spot_async.errors import DeadlineExceededError
from spot_async.loop.events import Evaluated, IterationFinished, PhaseEnded, WeightsServed
from spot_async.loop.publishing import LiveEvaluation
from spot_async.policies.opd import OpdPolicy
from spot_async.testing.services import VOCAB_SIZE, Latency, SimulatedStudent, SimulatedTrainer, capabilities
from spot_async.testing.simulation import make_policy, make_run, simulated_prompts
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.trainer.feed_check import sampled_spans

ITERATIONS = 8


@dataclass
class Watching:
    """A listener that checks how far the trainer is ahead, at every event, and keeps those of the publish pump."""

    run: object
    max_staleness: int
    served: list[int] = field(default_factory=list)
    evaluated: list[tuple[int, int]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    drains: int = 0
    ahead: int = 0

    def on(self, event):
        orchestrator = self.run.orchestrator
        ahead = orchestrator.trained.step - orchestrator.served.step
        assert 0 <= ahead <= self.max_staleness + 1
        self.ahead = max(self.ahead, ahead)
        match event:
            case WeightsServed():
                self.served.append(event.version.step)
            case IterationFinished(iteration=iteration):
                self.finished.append(iteration)
                assert iteration in getattr(self.run.trainer, "written", [iteration]), "its weights are not on disk"
            case Evaluated():
                self.evaluated.append((event.iteration, event.result))
            case PhaseEnded(pump="publish", name="drain"):
                self.drains += 1


def watched(max_staleness, *, in_flight_updates=True, policy=None, **changes):
    """A finished run, and what was seen of it."""
    student = changes.pop("student", None) or SimulatedStudent()
    run = make_run(
        policy or make_policy(OpdPolicy),
        student=student,
        capabilities={"student": capabilities(VOCAB_SIZE, in_flight_updates=in_flight_updates)},
        limits=same_limits(concurrency=64, timeout_s=60.0),
        **{"iterations": ITERATIONS, "max_staleness": max_staleness, **changes},
    )
    watching = Watching(run, max_staleness)
    run.stages.events.subscribe(watching)
    run_on_virtual_time(asyncio.wait_for(run.orchestrator.run(), 10_000.0))
    return run, watching


def seconds(run):
    """How long the run took."""
    return sum(
        times.wait_for_batch + times.train + times.update_weights + times.evaluate
        for times in (result.times_s for result in run.journal.results)
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("in_flight_updates", [True, False])
def test_no_token_is_older_than_the_bound_and_every_prompt_is_trained_once(max_staleness, in_flight_updates):
    run, watching = watched(max_staleness, in_flight_updates=in_flight_updates)
    assert [each.prompt_ordinal for each in run.trained] == list(range(ITERATIONS * 16))
    lags = [
        iteration - span.version.step
        for iteration, batch in enumerate(run.batches)
        for each in batch
        for span in sampled_spans(each)
    ]
    assert max(lags) == max_staleness
    assert min(lags) >= 0
    assert watching.served == sorted(set(watching.served))
    assert watching.served[-1] == ITERATIONS
    assert (watching.drains > 0) == (max_staleness > 0 and not in_flight_updates)


def test_sampling_training_and_updates_overlap_as_far_as_the_bound_lets_them():
    """Each of the three takes 10 s. A batch is sampled, trained on and served one after the other, which is 30 s."""
    constant, trainer = Latency(base_s=10.0, per_token_s=0.0, spread=0.0), SimulatedTrainer
    sizes = {"iterations": 40, "batch_size": 2}
    took = [
        seconds(watched(n, student=SimulatedStudent(constant), trainer=trainer(10.0), **sizes)[0]) / 40
        for n in (0, 1, 2, 4)
    ]
    assert took == pytest.approx([30.0, 15.0, 10.0, 10.0], rel=0.06)


class SlowUpdates(SimulatedStudent):
    """Takes `update_s` to load weights, and notes which, and what was asked of it meanwhile."""

    update_s = 10.0

    def __init__(self):
        super().__init__()
        self.loaded = []
        self.asked_meanwhile = 0
        self.in_flight = 0

    async def generate(self, *args, **rest):
        self.in_flight += 1
        try:
            return await super().generate(*args, **rest)
        finally:
            self.in_flight -= 1

    async def update_weights(self, snapshot, *, deadline):
        before = self.requests - self.in_flight
        await asyncio.sleep(self.update_s)
        self.asked_meanwhile += self.requests - before
        self.loaded.append(snapshot.version.step)
        self.version = snapshot.version


def test_of_weights_that_wait_for_a_slow_update_only_the_newest_is_sent():
    student = SlowUpdates()
    run, watching = watched(4, student=student)
    assert watching.served == student.loaded
    assert len(student.loaded) < ITERATIONS
    assert student.loaded[-1] == ITERATIONS
    assert watching.ahead > 1
    assert len(run.batches) == ITERATIONS


def test_a_student_that_cannot_do_both_answers_nothing_while_it_loads_weights():
    beside, drained = SlowUpdates(), SlowUpdates()
    watched(1, student=beside)
    watched(1, student=drained, in_flight_updates=False)
    assert beside.asked_meanwhile > 0
    assert drained.asked_meanwhile == 0


def test_weights_that_an_evaluation_is_due_on_are_served_and_measured_however_slow_updates_are():
    student = SlowUpdates()

    async def measure(iteration):
        await asyncio.sleep(5.0)
        return student.version.step

    _, watching = watched(4, student=student, evaluation=LiveEvaluation(lambda iteration: iteration % 2 == 0, measure))
    assert watching.evaluated == [(2, 2), (4, 4), (6, 6), (8, 8)]


def test_an_update_that_hangs_ends_the_run_although_training_goes_on():
    class Hanging(SimulatedStudent):
        async def update_weights(self, snapshot, *, deadline):
            async with asyncio.timeout_at(deadline):
                await asyncio.Event().wait()

    trainer = SimulatedTrainer()
    with pytest.raises(ExceptionGroup) as stopped:
        watched(2, student=Hanging(), trainer=trainer)
    (error,) = leaves(stopped.value)
    assert isinstance(error, TimeoutError | DeadlineExceededError)
    assert len(trainer.batches) == 3


def test_a_prompt_may_live_through_an_update_and_says_so_token_by_token():
    """This student notices new weights in the middle of its response."""

    class Switching(SimulatedStudent):
        async def generate(self, prompt_ids, sampling, **rest):
            began = self.version
            response = await super().generate(prompt_ids, sampling, **rest)
            if self.version == began or len(response.token_ids) < 2:
                return response
            ((span,), middle) = (response.version_spans, len(response.token_ids) // 2)
            spans = (
                msgspec.structs.replace(span, end=middle),
                msgspec.structs.replace(span, start=middle, version=self.version),
            )
            return msgspec.structs.replace(response, version_spans=spans)

    run, _ = watched(2, student=Switching(Latency(base_s=1.5)))
    mixed = [each for each in run.trained if len(sampled_spans(each)) > 1]
    assert mixed
    assert all(each.version == sampled_spans(each)[0].version for each in mixed)


@dataclass
class WritingTrainer(SimulatedTrainer):
    """It writes weights beside its next step, whose gradients take `step_s` of it."""

    write_s: float = 0.8
    written: list[int] = field(default_factory=list)
    _is_written: asyncio.Event = field(default_factory=asyncio.Event)

    async def train(self, iteration, batch):
        await asyncio.sleep(self.step_s)
        while len(self.written) < len(self.batches):
            self._is_written.clear()
            await self._is_written.wait()
        self.step_s, step_s = 0.0, self.step_s
        try:
            return await super().train(iteration, batch)
        finally:
            self.step_s = step_s

    async def published(self, step):
        await asyncio.sleep(self.write_s)
        self.written.append(step)
        self._is_written.set()
        return ()


def test_weights_are_written_beside_the_next_step_and_the_last_ones_are_served_in_the_end():
    # Sampling and updates take next to nothing, so an iteration takes what the trainer takes.
    def trained(max_staleness):
        student = SimulatedStudent(latency=Latency(base_s=0.001, per_token_s=0.0))
        return watched(max_staleness, student=student, trainer=WritingTrainer(), capacity_prompts=64)

    beside, watching = trained(1)
    assert watching.served[-1] == ITERATIONS
    assert beside.trainer.written == watching.finished == list(range(1, ITERATIONS + 1))
    waited = sum(each.times_s.train for each in beside.journal.results)
    assert waited == pytest.approx(ITERATIONS * 1.0), "what writes weights holds up no step"
    strict, watching = trained(0)
    assert watching.served[-1] == ITERATIONS
    assert seconds(strict) - seconds(beside) == pytest.approx((ITERATIONS - 1) * 0.8, rel=0.2)


@pytest.mark.parametrize("stop_s", [1.1, 2.5, 4.05])
def test_a_run_that_runs_out_of_prompts_or_is_stopped_has_its_last_weights_written(stop_s):
    run, _ = watched(2, trainer=WritingTrainer(write_s=5.0), prompts=simulated_prompts(3 * 16 + 4))
    assert run.trainer.written == [1, 2, 3]
    assert run.orchestrator.served.step == 3

    trainer = WritingTrainer(write_s=0.9)
    run = make_run(make_policy(OpdPolicy), trainer=trainer, iterations=ITERATIONS, max_staleness=2)

    async def stopped():
        asyncio.get_running_loop().call_later(stop_s, run.orchestrator.stop)
        await run.orchestrator.run()

    run_on_virtual_time(asyncio.wait_for(stopped(), 10_000.0))
    assert 0 < len(trainer.batches) < ITERATIONS
    assert trainer.written == list(range(1, len(trainer.batches) + 1))
