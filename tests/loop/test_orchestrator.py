"""The orchestrator on virtual time: order, strictness, back-pressure, failure, shutdown."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from limits import same_limits
from only_teacher import only

from spot_async.base import wire
from spot_async.base.tasks import leaves
from spot_async.errors import DeadlineExceededError, PermanentError, SpotError, ThrottledError, TransientError
from spot_async.loop.admission import PromptState
from spot_async.loop.publishing import LiveEvaluation
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.testing.services import Latency, SimulatedStudent, SimulatedTeacher
from spot_async.testing.simulation import make_policy, make_run, simulated_prompts
from spot_async.testing.virtual_time import run_on_virtual_time


def made(policy=None, *, concurrency=64, **changes):
    """A run of SPOT over four iterations, whose requests may take a minute."""
    return make_run(
        policy or make_policy(SpotPolicy),
        limits=same_limits(concurrency=concurrency, timeout_s=60.0),
        **{"iterations": 4, "prompts": simulated_prompts(problems=7), **changes},
    )


def cause(run):
    """Let it run, and return the one failure that ends it."""
    with pytest.raises(ExceptionGroup) as stopped:
        run.finish()
    (error,) = leaves(stopped.value)
    return error


class Failing(SimulatedTeacher):
    """Fails with this error where it is due, and without one it never answers there."""

    def __init__(self, error=None, due=lambda request: True):
        super().__init__()
        self.error, self.due, self.failures = error, due, 0

    async def score(self, request, **rest):
        if self.due(request):
            self.failures += 1
            if self.error is None:
                await asyncio.Event().wait()
            raise self.error
        return await super().score(request, **rest)


def is_fourth(request):
    """Of seven problems: those of ordinals 3, 10, 17, ..."""
    return len(request.prompt_ids) == 5 + 3


def test_an_evaluation_has_the_student_to_itself_and_measures_the_weights_just_trained():
    student = SimulatedStudent()
    seen = []

    async def evaluate(iteration):
        requests = student.requests
        await asyncio.sleep(1000)
        assert student.requests == requests
        seen.append((iteration, student.version.step))
        return f"result {iteration}"

    run = made(student=student, iterations=3, evaluation=LiveEvaluation(lambda iteration: iteration != 2, evaluate))
    journal = run.finish().journal
    assert seen == [(1, 1), (3, 3)]
    assert [(each.iteration, each.result, each.seconds) for each in journal.evaluated] == [
        (1, "result 1", pytest.approx(1000)),
        (3, "result 3", pytest.approx(1000)),
    ]
    assert [result.times_s.evaluate for result in journal.results] == pytest.approx([1000, 0, 1000])


def test_the_same_seed_gives_the_same_supervision_at_any_concurrency_and_latency():
    def supervision(concurrency, spread):
        run = made(student=SimulatedStudent(latency=Latency(spread=spread)), concurrency=concurrency).finish()
        return wire.encode(run.trained)

    assert supervision(1, 0.0) == supervision(7, 3.0) == supervision(64, 10.0)


def test_stages_of_different_prompts_overlap():
    run = made(iterations=1, batch_size=32).finish()
    busy_s = sum(stage.counters.busy_s for stage in run.stages.all)
    assert busy_s > 8 * run.journal.results[0].times_s.wait_for_batch


def test_a_stage_never_exceeds_its_concurrency_and_serves_old_prompts_first():
    served = []

    class Watching(SimulatedStudent):
        running = 0
        peak = 0

        async def generate(self, prompt_ids, sampling, *, session=None, **rest):
            self.running += 1
            self.peak = max(self.peak, self.running)
            served.append(int(session.removeprefix("prompt-")))
            try:
                return await super().generate(prompt_ids, sampling, session=session, **rest)
            finally:
                self.running -= 1

    student = Watching()
    made(make_policy(OpdPolicy), student=student, concurrency=3, iterations=1, batch_size=32).finish()
    assert student.peak == 3
    assert served == sorted(served)


def test_running_out_of_prompts_ends_the_run_and_accounts_for_the_left_over():
    run = made(iterations=10, batch_size=16, prompts=simulated_prompts(40)).finish()
    assert len(run.batches) == 2
    assert run.orchestrator.book.ordinals(PromptState.LEFT_OVER) == list(range(32, 40))


def test_a_prompt_that_fails_for_good_is_replaced_and_its_reason_kept():
    too_long = PermanentError("400: too long for this server")
    # one in seven is more than may die, so the run must stop and say why
    error = cause(made(teachers=only(Failing(too_long, is_fourth))))
    assert isinstance(error, SpotError)
    assert "too long for this server" in str(error)

    refuses_one = Failing(too_long, lambda request: is_fourth(request) and not run.journal.dead)
    run = made(teachers=only(refuses_one), iterations=3)
    run.finish()
    ((dead, reason),) = run.journal.dead.items()
    assert "too long" in str(reason)
    assert [each.prompt_ordinal for each in run.trained] == [o for o in range(49) if o != dead]


def test_too_many_given_up_before_the_first_batch_was_full_are_noticed_once_it_is():
    """Nobody fails afterwards: 4 of 12, when the first batch of 8 is there."""

    class RefusingTheFirst(SimulatedStudent):
        async def generate(self, prompt_ids, sampling, *, session=None, **rest):
            if int(session.removeprefix("prompt-")) < 4:
                raise PermanentError("400: too long for this server")
            return await super().generate(prompt_ids, sampling, session=session, **rest)

    run = made(student=RefusingTheFirst(), batch_size=8)
    error = cause(run)
    assert str(error).startswith("4 of 12 prompts failed for good, more than run.max_dead_share=0.1 allows")
    assert str(error).endswith("400: too long for this server")
    assert len(run.journal.dead) == 4
    assert run.batches == []


def test_transient_failures_are_retried_and_change_nothing():
    class Flaky(SimulatedStudent):
        failures = 0

        async def generate(self, prompt_ids, sampling, **rest):
            if self.failures < 40 and self.requests % 3 == 0:
                self.failures += 1
                self.requests += 1
                await asyncio.sleep(0.01)
                raise TransientError("connection reset")
            return await super().generate(prompt_ids, sampling, **rest)

    def responses(student):
        return [each.response_ids.tolist() for each in made(student=student).finish().trained]

    flaky = Flaky()
    assert responses(flaky) == responses(SimulatedStudent())
    assert flaky.failures == 40


def test_an_endpoint_that_is_away_for_seconds_costs_no_prompt():
    away = TransientError("teacher/score: connection refused")
    teacher = Failing(away, lambda request: 1.0 < asyncio.get_running_loop().time() < 9.0)
    run = made(teachers=only(teacher)).finish()
    assert teacher.failures > 0
    assert not run.journal.dead
    assert len(run.batches) == 4


def test_a_prompt_whose_requests_are_never_answered_is_replaced():
    failing = Failing(TransientError("500: out of memory"), lambda request: is_fourth(request) and len(dead) < 2)
    run = made(teachers=only(failing), iterations=3, batch_size=32)
    dead = run.journal.dead
    run.finish()
    assert len(dead) == 2
    assert {str(reason) for reason in dead.values()} == {"500: out of memory"}
    assert [each.prompt_ordinal for each in run.trained] == [o for o in range(98) if o not in dead]


@pytest.mark.long
def test_a_dead_endpoint_ends_the_run_within_a_minute_whatever_the_batch():
    async def scenario(**sizes):
        dead = Failing(TransientError("teacher/score: connection refused"))
        with pytest.raises(ExceptionGroup) as stopped:
            await made(teachers=only(dead), **sizes).orchestrator.run()
        assert "teacher/score: connection refused" in str(leaves(stopped.value)[0])
        assert asyncio.get_running_loop().time() < 90.0

    run_on_virtual_time(scenario(batch_size=1000, concurrency=1000))
    run_on_virtual_time(scenario(batch_size=1000, concurrency=1))
    run_on_virtual_time(scenario(batch_size=1))


class RefusingStudent(SimulatedStudent):
    """Takes no new weights the first `refusals` times, and continues with the old ones."""

    def __init__(self, error, refusals):
        super().__init__()
        self.error, self.refusals, self.asked_at = error, refusals, []

    async def update_weights(self, snapshot, *, deadline):
        self.asked_at.append(asyncio.get_running_loop().time())
        if len(self.asked_at) <= self.refusals:
            raise self.error
        await super().update_weights(snapshot, deadline=deadline)


@pytest.mark.parametrize(
    ("error", "pause_s"), [(TransientError("reset"), 0.1), (ThrottledError("busy", retry_after_s=20.0), 20.0)]
)
def test_new_weights_that_a_server_did_not_take_are_sent_again(error, pause_s):
    student = RefusingStudent(error, refusals=2)
    run = made(student=student).finish()
    assert len(run.journal.results) == len(run.batches) == 4
    assert len(student.asked_at) == 2 + 4
    assert (np.diff(student.asked_at[:3]) >= pause_s).all()


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (TransientError("reset"), 3),
        (ThrottledError("busy", retry_after_s=40.0), 2),  # a third would come after the time for an update
        (DeadlineExceededError("late"), 1),
        (PermanentError("other weights"), 1),
    ],
)
def test_a_server_that_takes_no_weights_ends_the_run_with_its_reason(error, times):
    student = RefusingStudent(error, refusals=10)
    run = made(student=student)
    assert cause(run) is error
    assert len(student.asked_at) == times
    assert not run.journal.results


def test_a_server_that_hangs_ends_the_run_with_the_stage_named():
    assert "score: no answer within 60 s" in str(cause(made(teachers=only(Failing()))))


def test_replies_that_are_lost_while_others_come_do_not_mean_that_the_endpoint_is_down():
    """In a batch they are the last to end, and thus in a row: a run once ended so with 86 % good replies."""
    asked = itertools.count()
    losing = Failing(due=lambda request: next(asked) % 16 in (3, 4, 5))
    run = made(make_policy(OpdPolicy), teachers=only(losing), max_dead_share=0.5).finish()
    assert len(run.journal.results) == 4
    assert len(run.journal.dead) > 3


def test_one_problem_that_goes_unanswered_again_and_again_does_not_mean_that_the_endpoint_is_down():
    one = made(teachers=only(Failing()), prompts=simulated_prompts(problems=1), max_dead_share=0.5)
    assert "16 of 16 prompts failed for good" in str(cause(one))
    assert "3 prompts in a row went unanswered" in str(cause(made(teachers=only(Failing()))))


def test_an_endpoint_that_asks_for_a_year_ends_the_run_with_its_own_words():
    closed = Failing(ThrottledError("teacher: HTTP 429: closed for a year", retry_after_s=366 * 86_400.0))

    async def run():
        try:
            await made(teachers=only(closed)).orchestrator.run()
        finally:
            ended_s.append(asyncio.get_running_loop().time())

    ended_s = []
    with pytest.raises(ExceptionGroup) as stopped:
        run_on_virtual_time(run())
    assert "3 prompts in a row went unanswered, the last one: teacher: HTTP 429: closed" in str(leaves(stopped.value))
    assert ended_s[0] < 30.0  # its stage would allow a minute


@pytest.mark.parametrize("moment_s", [0.001, 0.05, 0.3, 1.0, 2.5, 4.0])
def test_cancelling_at_any_moment_leaves_no_task_behind(moment_s):
    async def cancel_midway():
        run = made(iterations=50)
        task = asyncio.create_task(run.orchestrator.run())
        await asyncio.sleep(moment_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert all(stage.in_flight == 0 and stage.waiting == 0 for stage in run.stages.all)

    run_on_virtual_time(cancel_midway())


def test_spot_without_positions_is_opd_bit_for_bit():
    spot = made(make_policy(SpotPolicy, positions=0)).finish().trained
    opd = made(make_policy(OpdPolicy)).finish().trained
    for ours, theirs in zip(spot, opd, strict=True):
        assert ours.soft_targets == theirs.soft_targets == ()
        for name in ("prompt_ids", "response_ids", "behavior_logprobs"):
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
        assert ours.pulls[0].logprobs.tobytes() == theirs.pulls[0].logprobs.tobytes()
