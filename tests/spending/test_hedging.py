"""A slow request is sent once more, the first answer counts, and nobody is left running."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from spot_async.base.retry import RetryPolicy
from spot_async.errors import BudgetSpentError, TransientError
from spot_async.replicas.pool import ReplicaPool
from spot_async.replicas.service_pool import Errand
from spot_async.stages.stage import Stage
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Capabilities


class Replica:
    """A lease and its service at once: answers its name after a while, or fails."""

    work = 0

    def __init__(self, name, *outcomes):
        self.replica = name
        self.outcomes = list(outcomes)  # seconds, or an error after one second
        self.cancelled = self.answered = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        pass

    async def ask(self):
        outcome = self.outcomes.pop(0)
        try:
            await asyncio.sleep(1.0 if isinstance(outcome, Exception) else outcome)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(outcome, Exception):
            raise outcome
        self.answered += 1
        return self.replica


class Pool:
    """Gives the first replica that the errand has not failed on."""

    def __init__(self, *replicas, wait_s=0.0):
        self.replicas = replicas
        self.wait_s = wait_s

    async def lease(self, errand: Errand):
        await asyncio.sleep(self.wait_s)
        return next((each for each in self.replicas if each.replica not in errand.failed_on), self.replicas[0])


def stage_of(pool, *, after_s=3.0, timeout_s=60.0):
    return Stage(
        "score",
        pool,
        concurrency=1,
        timeout_s=timeout_s,
        retry=RetryPolicy(1),
        mailbox_capacity=1,
        jitter=lambda: 0.0,
        hedge_after_s=after_s,
    )


def ask(pool, **times):
    """The answer, the seconds that it took, and the stage's counters."""
    stage = stage_of(pool, **times)

    async def run():
        started = asyncio.get_running_loop().time()
        answer = await stage.ask((0,), lambda replica, deadline: replica.ask())
        taken_s = asyncio.get_running_loop().time() - started
        assert len(asyncio.all_tasks()) == 1
        assert stage.in_flight == 0
        return answer, taken_s

    return (*run_on_virtual_time(run()), stage.counters)


def test_a_quick_answer_is_asked_for_once():
    a, b = Replica("a", 2.0), Replica("b")
    answer, taken_s, counters = ask(Pool(a, b))
    assert (answer, taken_s, counters.hedged) == ("a", pytest.approx(2.0), 0)


def test_a_slow_one_is_asked_for_elsewhere_and_given_up_once_the_second_answers():
    a, b = Replica("a", 50.0), Replica("b", 2.0)
    answer, taken_s, counters = ask(Pool(a, b))
    assert (answer, taken_s, counters.hedged) == ("b", pytest.approx(5.0), 1)
    assert (a.cancelled, counters.completed, counters.failed) == (1, 1, 0)


def test_the_first_still_counts_when_it_is_the_first_to_answer():
    a, b = Replica("a", 4.0), Replica("b", 10.0)
    answer, taken_s, _ = ask(Pool(a, b))
    assert (answer, taken_s, b.cancelled) == ("a", pytest.approx(4.0), 1)


def test_the_only_server_is_asked_again():
    answer, taken_s, counters = ask(Pool(Replica("a", 50.0, 1.0)))
    assert (answer, taken_s, counters.hedged) == ("a", pytest.approx(4.0), 1)


def test_waiting_for_a_server_is_no_slowness_of_its_own():
    _, taken_s, counters = ask(Pool(Replica("a", 2.0), wait_s=30.0))
    assert (taken_s, counters.hedged) == (pytest.approx(32.0), 0)


def test_a_request_is_in_flight_once_wherever_its_second_sending_is():
    pool = Pool(Replica("a", 50.0), Replica("b", 2.0), wait_s=5.0)
    stage = stage_of(pool)

    async def run():
        asking = asyncio.create_task(stage.ask((0,), lambda replica, deadline: replica.ask()))
        seen = []
        for _ in range(3):  # waits for a server; is sent, and its second waits for one; both are sent
            await asyncio.sleep(4.5)
            seen.append((stage.in_flight, stage.waiting))
        assert await asking == "b"
        return seen

    assert run_on_virtual_time(run()) == [(0, 1), (1, 0), (1, 0)]


def test_a_failure_before_the_second_is_the_requests():
    with pytest.raises(TransientError, match="reset"):
        ask(Pool(Replica("a", TransientError("reset")), Replica("b", 1.0)))


@pytest.mark.parametrize("second", [TransientError("reset"), BudgetSpentError("spent")])
def test_a_second_that_fails_or_cannot_be_paid_leaves_the_first(second):
    answer, taken_s, _ = ask(Pool(Replica("a", 8.0), Replica("b", second)))
    assert (answer, taken_s) == ("a", pytest.approx(8.0))


def test_a_deadline_that_comes_first_leaves_no_second():
    with pytest.raises(TransientError, match="no answer within 2 s"):
        ask(Pool(Replica("a", 50.0), Replica("b", 0.1)), timeout_s=2.0)


def test_a_server_that_ends_of_the_second_request_is_remembered_of_the_first():
    """Or a prompt that ends servers would go on ending them."""
    errands = []

    class Losing(Pool):
        async def lease(self, errand):
            errands.append(errand)
            errand.losses += 1
            return await super().lease(errand)

    ask(Losing(Replica("a", 50.0), Replica("b", 1.0)))
    assert [errand.losses for errand in errands] == [2, 2]


class Teacher(Replica):
    """As a pool takes it."""

    async def capabilities(self, *, deadline):
        return Capabilities(
            model="m",
            vocab_size=8,
            vocab_fingerprint="f",
            max_context_tokens=100,
            max_top_k=8,
            exact_entropy=True,
            candidate_logprobs="none",
            weight_update=False,
        )

    async def watch(self):
        await asyncio.get_running_loop().create_future()


def test_a_pools_other_server_gets_the_second_request():
    teachers = {"teacher-1": Teacher("teacher-1", 50.0, 50.0), "teacher-2": Teacher("teacher-2", 2.0, 2.0)}
    spans = []

    async def run():
        pool = ReplicaPool("teacher", {name: lambda it=it: it for name, it in teachers.items()})
        async with pool:
            stage = Stage(
                "score",
                pool,
                concurrency=1,
                timeout_s=60.0,
                retry=RetryPolicy(1),
                mailbox_capacity=2,
                jitter=lambda: 0.0,
                hedge_after_s=3.0,
            )
            stage.timeline = SimpleNamespace(request_asked=lambda asked_s: None, request_ended=spans.append)
            # of one session, so both go to the same server first
            return [await stage.ask((0,), lambda it, deadline: it.ask(), session="p") for _ in range(2)], stage.counters

    answers, counters = run_on_virtual_time(run())
    assert "teacher-2" in answers
    assert teachers["teacher-1"].answered == 0
    assert counters.hedged >= 1
    assert [span.replica for span in spans] == answers  # the one that answered
