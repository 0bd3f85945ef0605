"""A replica's concurrency limit: step by step, and under a strict run's traffic on a simulated engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from only_teacher import only

from spot_async.base.tasks import gather
from spot_async.errors import DeadlineExceededError, ThrottledError
from spot_async.policies.opd import OpdPolicy
from spot_async.replicas.concurrency_limit import WINDOW_REQUESTS, ConcurrencyLimit, Moment
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.pool import PeopleListener, ReplicaPool
from spot_async.testing.services import capabilities, token_scores
from spot_async.testing.simulation import make_policy, make_run
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Problem, Prompt, ScoredPositions

BATCH, PROBES, SLOTS = 64, 8, 64
CONCURRENCY = {"rollout": 64, "candidates": 64, "probe": 256}  # as the defaults of `stages`
TRAIN_S, VERIFY_S = 0.25, 0.005


def answer(limit, sent_s, now_s, *, in_flight):
    sent, now = (Moment(s, in_flight * s, in_flight * s) for s in (sent_s, now_s))
    limit.succeeded("probe", sent=sent, now=now, work=10, in_flight=in_flight)


def time_out(limit, sent_s, now_s, *, in_flight, work=10, answered=0, last_in_flight=None):
    """A request is not answered in time, while `in_flight` shared the server and answers amounted to `answered`."""
    busy_s = in_flight * (now_s - sent_s)
    sent, now = Moment(sent_s, 0.0, 0.0, kind_work=99), Moment(now_s, busy_s, busy_s, kind_work=99 + answered)
    limit.timed_out("probe", "late", sent=sent, now=now, work=work, in_flight=last_in_flight or in_flight)


@given(
    st.lists(
        st.tuples(st.sampled_from(["answer", "refuse", "time out"]), st.floats(0, 5), st.integers(1, 60)), max_size=80
    ),
    st.sampled_from([1, 8, 64]),
)
def test_a_limit_stays_between_one_and_the_most(events, slots):
    limit, now_s = ConcurrencyLimit(32, slots), 0.0
    for kind, seconds, in_flight in events:
        now_s += seconds
        if kind == "answer":
            answer(limit, now_s - 2.0, now_s, in_flight=in_flight)
        elif kind == "refuse":
            limit.refused(kind, sent_s=now_s - 2.0, now_s=now_s, in_flight=in_flight)
        else:
            time_out(limit, now_s - 2.0, now_s, in_flight=in_flight)
        assert 1 <= limit.value <= 32


def test_a_storm_of_refusals_lowers_the_limit_once_a_round_trip():
    limit = ConcurrencyLimit(512)
    for _ in range(40):  # all sent before anybody knew
        limit.refused("429", sent_s=0.0, now_s=1.0, in_flight=40)
    assert limit.value == 28  # seven tenths of what was in flight, not of the limit that nobody used
    assert limit.decreases == 1
    limit.refused("429", sent_s=1.0, now_s=2.0, in_flight=28)
    assert limit.value == 19


def test_a_limit_grows_by_one_a_round_trip_and_only_when_it_is_used():
    limit = ConcurrencyLimit(512)
    limit.refused("429", sent_s=0.0, now_s=1.0, in_flight=20)
    for _ in range(100):
        answer(limit, 2.0, 3.0, in_flight=5)
    assert limit.value == 14
    for round_trip in range(1, 5):
        for _ in range(limit.value + 1):
            answer(limit, 3.0, 4.0, in_flight=limit.value)
        assert limit.value == 14 + round_trip


class Traffic:
    """Whole windows of requests, one after the other."""

    def __init__(self, limit):
        self.limit = limit
        self.s = self.busy_s = 0.0
        self.stages_busy_s = Counter()

    def windows(self, seconds, *, in_flight, work=10, count=1, stage="probe", share=1.0, left=None, updated_s=None):
        """`share` of what is in flight is the stage's; `left` of it are in flight as they are answered.

        `updated_s`: when, after the requests were sent, the server continued with new weights.
        """
        for _ in range(count):
            sent = Moment(self.s, self.busy_s, self.stages_busy_s[stage])
            if updated_s is not None:
                self.limit.interrupted(self.s + updated_s)
            self.s += seconds
            self.busy_s += seconds * in_flight
            self.stages_busy_s[stage] += seconds * in_flight * share
            now = Moment(self.s, self.busy_s, self.stages_busy_s[stage])
            for _ in range(max(WINDOW_REQUESTS, in_flight)):
                self.limit.succeeded(stage, sent=sent, now=now, work=work, in_flight=left or in_flight)
        return self.limit.value, self.limit.decreases


def test_latency_lowers_the_limit_where_neither_length_nor_load_explains_it():
    traffic = Traffic(ConcurrencyLimit(64))
    traffic.windows(1.0, in_flight=8, count=5)
    traffic.windows(10.0, in_flight=8, work=100, count=5)  # longer requests
    traffic.windows(40.0, in_flight=32, work=100, count=5)  # four times the load
    assert traffic.windows(90.0, in_flight=8, work=10, count=5, stage="rollout") == (64, 0)  # another kind
    assert traffic.windows(10.0, in_flight=8) == (64, 0)  # a pause, perhaps
    assert traffic.windows(1.0, in_flight=8, count=20) == (64, 0)
    assert traffic.windows(10.0, in_flight=8) == (64, 0)
    assert traffic.windows(10.0, in_flight=8) == (5, 1)


def test_requests_that_saw_an_update_say_nothing_of_the_load():
    traffic = Traffic(ConcurrencyLimit(64))
    traffic.windows(1.0, in_flight=8, count=5)
    assert traffic.windows(10.0, in_flight=8, count=5, updated_s=9.0) == (64, 0)
    assert traffic.windows(10.0, in_flight=8, count=2) == (5, 1)


def test_latency_lowers_the_limit_from_the_last_burst_and_not_from_what_is_left_of_it():
    traffic = Traffic(ConcurrencyLimit(512))
    traffic.windows(1.0, in_flight=8, count=5)
    traffic.windows(1.0, in_flight=100)
    assert traffic.windows(10.0, in_flight=8, count=2) == (56, 1)  # 0.7 x 0.9 x 0.9 x 100


def test_the_load_that_explains_latency_is_what_requests_met_and_not_what_is_left_as_they_end():
    traffic = Traffic(ConcurrencyLimit(64))
    traffic.windows(1.0, in_flight=8, count=5)
    assert traffic.windows(4.0, in_flight=32, left=4, count=5) == (64, 0)


def test_a_server_that_stays_slow_is_lowered_a_few_times_and_then_taken_as_it_is():
    traffic = Traffic(ConcurrencyLimit(100))
    traffic.windows(1.0, in_flight=50, count=5)
    assert traffic.windows(4.0, in_flight=50, left=20, count=40)[1] == 2


def test_a_bad_window_before_a_refusal_says_nothing_of_the_load_after_it():
    limit = ConcurrencyLimit(64)
    traffic = Traffic(limit)
    traffic.windows(1.0, in_flight=20, count=5)
    traffic.windows(10.0, in_flight=20)
    limit.refused("HTTP 429", sent_s=traffic.s, now_s=traffic.s, in_flight=20)
    assert traffic.windows(10.0, in_flight=10) == (14, 1)


def test_latency_of_requests_that_are_little_of_what_a_server_does_says_nothing():
    traffic = Traffic(ConcurrencyLimit(64))
    traffic.windows(1.0, in_flight=8, share=0.2, count=5)
    assert traffic.windows(10.0, in_flight=8, share=0.2, count=5) == (64, 0)


def test_latency_leaves_a_server_the_slots_that_it_has_and_refusals_do_not():
    limit = ConcurrencyLimit(512, slots=64)
    traffic = Traffic(limit)
    traffic.windows(1.0, in_flight=80, count=5)
    assert traffic.windows(10.0, in_flight=80, count=2) == (64, 1)
    limit.refused("HTTP 429", sent_s=traffic.s, now_s=traffic.s, in_flight=60)
    assert limit.value == 42


def test_a_time_out_lowers_the_limit_unless_only_that_reply_was_lost():
    def after(**more):
        limit = ConcurrencyLimit(64)
        time_out(limit, 0.0, 2.0, **more)
        return limit.value

    assert after(in_flight=16) == 11  # nothing was answered meanwhile
    assert after(in_flight=16, answered=10) == 11  # one in 32 seconds: too slow for all 16
    assert after(in_flight=16, answered=160) == 64  # 16 in 32 seconds, so this one had its time
    assert after(in_flight=16, answered=160, work=20) == 11  # but not if its answer may be twice as long
    assert after(in_flight=16, last_in_flight=1) == 11  # the last of a burst: the number at its end says nothing
    assert after(in_flight=1) == 64  # fewer than one cannot be


@pytest.mark.parametrize(("error", "expected"), [(DeadlineExceededError("late"), 512), (ThrottledError("503"), 1)])
def test_a_straggler_that_times_out_alone_leaves_the_limit_as_it_is(error, expected):
    async def scenario():
        pool = ReplicaPool("student", {"student": lambda: Backend(None, 64)})
        async with pool:
            lease = await pool.lease(LeaseRequest("rollout", (0,)))
            with pytest.raises(type(error)):
                async with lease:
                    raise error
            return pool.replicas[0].limit

    assert run_on_virtual_time(scenario()) == expected


@dataclass
class Engine:
    """Steps as the engine of `spot-async serve` does: scores what waits, reads prompts into free slots, decodes a token
    of each."""

    score_s: float  # of one response
    step_s: float = 0.002
    slower: float = 1.0  # factor on every time
    waiting: deque = field(default_factory=deque)
    scoring: list = field(default_factory=list)
    decoding: list = field(default_factory=list)
    work: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, tokens):
        done = asyncio.get_running_loop().create_future()
        self.waiting.append([tokens, done])
        self.work.set()
        await done

    async def score(self):
        done = asyncio.get_running_loop().create_future()
        self.scoring.append(done)
        self.work.set()
        await done

    async def run(self):
        since_read = 0
        while True:
            if not (self.waiting or self.scoring or self.decoding):
                self.work.clear()
                await self.work.wait()
            scored, self.scoring = self.scoring, []
            await asyncio.sleep(self.slower * self.score_s * len(scored))
            for done in scored:
                done.set_result(None)
            free = SLOTS - len(self.decoding)
            is_due = not self.decoding or len(self.waiting) >= free >= SLOTS // 8 or since_read >= 8
            if self.waiting and free and is_due:
                self.decoding += [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
                await asyncio.sleep(self.slower * self.step_s)
                since_read = 0
            if self.decoding:
                await asyncio.sleep(self.slower * self.step_s)
                since_read += 1
            for each in self.decoding:
                each[0] -= 1
                if not each[0]:
                    each[1].set_result(None)
            self.decoding = [each for each in self.decoding if each[0]]


class Backend:
    """A server that answers whatever its engine does, and says how many slots that has."""

    def __init__(self, engine, slots):
        self.engine, self.slots = engine, slots

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        pass

    async def capabilities(self, *, deadline):
        return capabilities(8, slots=self.slots)


def strict_iterations(count, *, seed, slots=None, slower=None, slower_from=0):
    """The quickstart's traffic: a batch's rollouts at once, each scored by a teacher, then its candidates, then its
    probes; nothing while training. Returns each event that the student's limit was lowered, with its iteration, and
    the lines that people were told."""

    async def scenario():
        rng = random.Random(seed)
        student, teacher = Engine(score_s=0.001), Engine(score_s=0.002)
        lines: list[str] = []
        pool = ReplicaPool(
            "student", {"student": lambda: Backend(student, slots)}, people=PeopleListener(warn=lines.append)
        )

        turns = {stage: asyncio.Semaphore(most) for stage, most in CONCURRENCY.items()}

        async def ask(stage, priority, tokens, answer):
            async with turns[stage]:
                request = LeaseRequest(stage, priority)
                async with await pool.lease(request):
                    await answer
                    request.work = tokens

        def some_tokens(mean):
            return 1 + min(159, int(rng.expovariate(1 / mean)))

        async def supervise(ordinal):
            tokens = some_tokens(45)
            await ask("rollout", (ordinal,), tokens, student.generate(tokens))
            await teacher.score()
            await asyncio.sleep(VERIFY_S)
            await ask("candidates", (ordinal,), 30 + tokens, student.score())
            lengths = [some_tokens(25) for _ in range(PROBES)]
            await gather([ask("probe", (ordinal, i), n, student.generate(n)) for i, n in enumerate(lengths)])

        lowered = []
        async with pool:
            engines = [asyncio.create_task(each.run()) for each in (student, teacher)]
            for iteration in range(1, count + 1):
                if iteration == slower_from:
                    student.slower = slower
                before = len(events)
                await gather([supervise(iteration * BATCH + i) for i in range(BATCH)])
                lowered += [(iteration, each) for each in events[before:]]
                await asyncio.sleep(TRAIN_S)
            for task in engines:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return lowered, lines

    with structlog.testing.capture_logs() as events:
        return run_on_virtual_time(scenario())


@pytest.mark.parametrize("seed", [0, 3, 29])
def test_bursts_of_a_strict_run_never_lower_the_limit_of_a_server_at_constant_speed(seed):
    """In these, some window's latency is more than twice what the load at its answers explains: of candidates, which
    take as long as what they happen to meet, and of the last probes of an iteration."""
    assert strict_iterations(4, seed=seed) == ([], [])


class Teacher(Backend):
    """Reads each response once, at the same speed whatever it has beside it."""

    def __init__(self):
        super().__init__(engine=None, slots=None)

    async def score(self, request, **settings):
        await asyncio.sleep(5e-4 * len(request.response_ids))
        return token_scores([])

    async def score_at(self, request, positions, **settings):
        await asyncio.sleep(0.015 * len(positions))
        none = np.zeros(0, np.float32)
        return ScoredPositions(
            topk_ids=np.zeros((0, 1), np.int32), topk_logprobs=none, entropy_lower=none, entropy_upper=none
        )


def test_single_positions_beside_whole_responses_never_lower_the_limit_of_a_server_at_constant_speed():
    """The rate limit counts a prefix for each position, and a server that has it reads it once: a token of these takes
    far less time than a response's."""

    async def scenario():
        rng = random.Random(0)
        pool = ReplicaPool("teacher", {"teacher": Teacher})
        stages = make_run(make_policy(OpdPolicy), teachers=only(pool), capacity_prompts=256).stages

        async def supervise(ordinal):
            problem = Problem(id="p", text="", answer="")
            prompt = Prompt(ordinal=ordinal, problem=problem, token_ids=np.zeros(100, np.int32))
            asked = stages.for_prompt(prompt)
            await asyncio.sleep(rng.expovariate(1 / 20))  # rollouts end one after another
            response_ids = np.zeros(rng.randint(1000, 4000), np.int32)
            await asked.score(response_ids, top_k=1)
            for _ in range(2):
                await asked.score_at(response_ids, np.arange(10), top_k=1)

        async with pool:
            for iteration in range(6):
                await gather([supervise(iteration * 256 + i) for i in range(256)])
            return pool.replicas[0].limit, pool.replicas[0].decreases

    assert run_on_virtual_time(scenario()) == (512, 0)


@pytest.mark.parametrize(("slots", "least"), [(None, 1), (300, 300)])
def test_a_server_that_gets_much_slower_is_found_within_two_iterations_and_never_left_with_empty_slots(slots, least):
    lowered, lines = strict_iterations(6, seed=0, slots=slots, slower=4.0, slower_from=3)
    iterations, events = zip(*lowered, strict=True)
    assert iterations[0] <= 4
    assert (events[0]["replica"], events[0]["stage"], events[0]["before"]) == ("student", "probe", 512)
    assert re.fullmatch(
        r"probe requests took \S+ ms a token, \d+\.\d times as long as the \d+ in flight explain", events[0]["reason"]
    )
    assert lines == []  # for the log and the report: there is nothing that anybody must do
    for each in events:
        assert max(least, each["in_flight"] * 2 // 3) <= each["after"] < each["before"]
