"""What a pool decides: where a request goes, when a replica is trusted, who goes first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replica_incidents import Server

from spot_async.errors import ConfigError, DeadlineExceededError, PermanentError, ThrottledError, TransientError
from spot_async.replicas.capabilities import MODEL, check_same, combined
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import FAILURES_TO_SUSPECT, MOVES, LifeCycle, State
from spot_async.replicas.pool import ReplicaPool
from spot_async.replicas.replica import Replica
from spot_async.replicas.router import Router
from spot_async.replicas.scheduler import Scheduler
from spot_async.spending.rate_limit import LEASED, RateLimiter
from spot_async.testing.services import capabilities
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import WeightVersion


@dataclass
class Load:
    name: str
    in_flight: int
    most_in_flight: int

    @property
    def load(self):
        return self.in_flight / self.most_in_flight


loads = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda pairs: [Load(f"r{i}", min(in_flight, most), most) for i, (in_flight, most) in enumerate(pairs)]
)


@given(loads, st.sets(st.integers(0, 3)))
def test_a_request_goes_where_there_is_most_room_and_last_to_where_it_failed(replicas, failed_on):
    avoid = {f"r{i}" for i in failed_on}
    chosen = Router().choose(None, replicas, avoid)
    free = [each for each in replicas if each.in_flight < each.most_in_flight]
    if not free:
        assert chosen is None
        return
    best = [each for each in free if each.name not in avoid] or free
    assert chosen in best
    assert all(chosen.in_flight / chosen.most_in_flight <= each.in_flight / each.most_in_flight for each in best)


@given(loads)
def test_a_session_stays_where_its_prefix_is_while_that_replica_serves_and_has_room(after):
    router, home = Router(), after[0]
    later, home.in_flight = home.in_flight, 0
    router.choose("s", [home])
    home.in_flight = later
    least = min(each.in_flight / each.most_in_flight for each in after)
    assume(home.in_flight <= 2 * least * home.most_in_flight + 8)  # else it is overtaken
    later = router.choose("s", after)
    if home.in_flight < home.most_in_flight:
        assert later is home
    elif later is not None:
        home.in_flight = 0
        assert router.choose("s", after) is home  # elsewhere that once, and back


def test_a_session_moves_for_good_when_its_replica_serves_no_more_or_falls_behind():
    router = Router()
    a, b = Load("a", 0, 100), Load("b", 0, 100)
    assert router.choose("s", [a]) is a
    a.in_flight, b.in_flight = 40, 16
    assert router.choose("s", [a, b]) is a
    a.in_flight = 41
    assert router.choose("s", [a, b]) is b
    a.in_flight, b.in_flight = 0, 7
    assert router.choose("s", [a, b]) is b
    assert router.choose("s", [a]) is a
    assert router.choose("s", [a, b]) is a


def test_new_sessions_are_divided_evenly_whatever_is_in_flight_when_they_come():
    """What they will ask is yet to come: in flight is what the sessions before them ask."""
    router = Router()
    a, b = Load("a", 5, 100), Load("b", 0, 100)
    homes = [router.choose(f"s{i}", [a, b]).name for i in range(100)]
    assert homes.count("a") == 50
    slow = Load("c", 0, 50)
    homes = [router.choose(f"t{i}", [a, slow]).name for i in range(1000)]
    assert homes[-600:].count("c") == pytest.approx(200, abs=10)


def test_sessions_that_were_not_heard_of_for_longest_are_forgotten():
    router = Router(sessions=2)
    a, b = Load("a", 0, 9), Load("b", 0, 9)
    assert [router.choose(session, [a]) for session in ("1", "2", "1", "3")] == [a] * 4
    assert [router.choose(session, [a, b]) for session in ("1", "3", "2")] == [a, a, b]  # 2 is new again


@given(st.lists(st.sampled_from([*State, "answered", "failed"]), max_size=40))
def test_only_replicas_that_are_trusted_at_the_version_get_requests(events):
    life = LifeCycle(0.0)
    life.version = WeightVersion(0, 1)
    for event in events:
        before = life.state
        if event == "answered":
            life.answered(1.0)
            assert life.state == (State.SERVING if before is State.HALF_OPEN else before)
        elif event == "failed":
            life.failed(1.0, 1.0)
        elif event in MOVES[before]:
            life.move(event, 1.0)
        else:
            with pytest.raises(ValueError, match="cannot go from"):
                life.move(event, 1.0)
        assert not life.takes(WeightVersion(0, 2), 0)
        assert life.takes(life.version, 0) == (life.state in (State.SERVING, State.HALF_OPEN))
        assert life.takes(life.version, 1) == (life.state is State.SERVING)


def test_a_replica_is_suspect_after_failures_in_a_row_and_after_a_single_one_on_trial():
    life = LifeCycle(0.0)
    life.move(State.SERVING, 0.0)
    for _ in range(3):
        assert [life.failed(0.0, 0.0) for _ in range(FAILURES_TO_SUSPECT - 1)] == [False] * (FAILURES_TO_SUSPECT - 1)
        life.answered(0.0)
    assert [life.failed(0.0, 0.0) for _ in range(FAILURES_TO_SUSPECT)][-1]
    assert not life.failed_trial
    life.move(State.HALF_OPEN, 0.0)
    assert life.failed(0.0, 0.0)
    assert life.failed_trial


class Service:
    """A backend that does nothing; only its identity matters."""


def scheduler(count=1, most=1, rate_limit=None, warn=lambda line: None):
    replicas: list[Replica] = []
    pool = Scheduler(replicas, rate_limit, warn)
    for i in range(count):
        replicas.append(Replica(f"r{i}", Service, Service(), max_in_flight=most, moved=pool.replica_moved))
        replicas[-1].life.move(State.SERVING, 0.0)
    return pool, replicas


async def hold(pool, request, seconds, log):
    async with await pool.lease(request) as _:
        log.append(request)
        await asyncio.sleep(seconds)


def test_the_oldest_prompt_goes_first_whichever_stage_it_asks():
    async def scenario():
        pool, _ = scheduler()
        log: list[LeaseRequest] = []
        async with asyncio.TaskGroup() as group:
            for stage, priority in [("rollout", (9,)), ("rollout", (5,)), ("probe", (3, 7)), ("candidates", (3,))]:
                group.create_task(hold(pool, LeaseRequest(stage, priority), 1.0, log))
        assert [request.priority for request in log] == [(9,), (3,), (3, 7), (5,)]

    run_on_virtual_time(scenario())


@settings(max_examples=60)
@given(st.data())
def test_no_place_is_lost_to_cancellation_or_to_a_replica_that_is_taken_out(data):
    async def scenario():
        pool, replicas = scheduler(count=2, most=2)
        log: list[LeaseRequest] = []
        requests = [LeaseRequest("probe", (i,), session=f"s{i % 3}") for i in range(12)]
        tasks = [asyncio.create_task(hold(pool, request, 1.0, log)) for request in requests]
        for task in data.draw(st.lists(st.sampled_from(tasks), max_size=6)):
            await asyncio.sleep(data.draw(st.sampled_from([0.0, 0.5, 1.0])))
            task.cancel()
        if data.draw(st.booleans()):
            replicas[0].life.move(State.OPEN, 0.0)
            replicas[0].take_back("it froze", is_lost=True)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [each for each in results if isinstance(each, Exception) and "given up: it froze" not in str(each)]
        assert [each.in_flight for each in replicas] == [0, 0]
        assert len(pool) == 0

    run_on_virtual_time(scenario())


def test_a_replica_that_is_lost_gives_its_requests_back_at_once():
    async def scenario():
        pool, (replica,) = scheduler()
        request = LeaseRequest("probe", (0,))
        task = asyncio.create_task(hold(pool, request, 1000.0, []))
        await asyncio.sleep(1.0)
        replica.life.move(State.OPEN, 1.0)
        replica.take_back("no answer to a ping", is_lost=True)
        with pytest.raises(TransientError, match="r0: given up: no answer to a ping"):
            await task
        assert asyncio.get_running_loop().time() == 1.0
        assert (request.losses, request.failed_on) == (1, {"r0"})

    run_on_virtual_time(scenario())


def test_a_rate_limit_holds_up_everybody_behind_the_first():
    async def scenario():
        limit = RateLimiter(tokens_per_minute=60)
        pool, _ = scheduler(most=99, rate_limit=limit)
        started: dict[int, float] = {}

        async def ask(number, tokens):
            async with await pool.lease(LeaseRequest("score", (number,), tokens=tokens)):
                started[number] = asyncio.get_running_loop().time()
                limit.send(started[number], limit.claim(LEASED.get()))

        async with asyncio.TaskGroup() as group:
            for number, tokens in enumerate([3, 50, 1, 1]):
                group.create_task(ask(number, tokens))
        assert started == pytest.approx({0: 0.0, 1: 3.0, 2: 53.0, 3: 54.0})

    run_on_virtual_time(scenario())


def test_a_request_that_servers_end_of_is_sent_alone_and_then_given_up():
    """Two losses make it and its company suspect; one of them at a time then, so that the third convicts the right
    one."""

    async def scenario():
        pool, (replica,) = scheduler(most=99)
        deadly = LeaseRequest("rollout", (0,))
        requests = [deadly, *(LeaseRequest("rollout", (i,)) for i in range(1, 6))]
        given_up: list[LeaseRequest] = []
        answered: list[LeaseRequest] = []

        async def ask(request):
            while True:
                try:
                    async with await pool.lease(request):
                        await asyncio.sleep(1.0)
                        if request is deadly:
                            replica.take_back("it ended", is_lost=True)
                        await asyncio.sleep(1.0)
                except TransientError:
                    continue
                except PermanentError:
                    given_up.append(request)
                    return
                answered.append(request)
                return

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(ask(request))
        assert given_up == [deadly]
        with pytest.raises(PermanentError, match="rollout: 3 times a server ended or froze"):
            deadly.check()
        assert len(answered) == 5

    run_on_virtual_time(scenario())


def test_a_request_that_is_convicted_while_it_waits_is_not_sent():
    """As the second sending of a slow request is, when a server ends of the first."""

    async def scenario():
        pool, (replica,) = scheduler(most=9)
        request = LeaseRequest("score", (0,), losses=2)
        sent = []

        async def send():
            async with await pool.lease(request):
                sent.append(request)
                await asyncio.sleep(1000.0)

        first, second = asyncio.create_task(send()), asyncio.create_task(send())
        await asyncio.sleep(1.0)
        assert len(sent) == 1  # beside it no other suspect is sent
        replica.take_back("it ended", is_lost=True)
        with pytest.raises(TransientError, match="it ended"):
            await first
        with pytest.raises(PermanentError, match="score: 3 times a server ended or froze"):
            await second
        assert len(sent) == 1
        assert replica.in_flight == 0

    run_on_virtual_time(scenario())


def test_suspected_requests_that_wait_hold_up_nobody_who_comes_later():
    async def scenario():
        pool, (replica,) = scheduler(most=9)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(hold(pool, LeaseRequest("probe", (0,), losses=2), 15.0, []))
            await asyncio.sleep(1.0)
            await hold(pool, LeaseRequest("probe", (5,)), 0.5, [])
            assert asyncio.get_running_loop().time() == 1.5
        assert (replica.in_flight, len(pool)) == (0, 0)

    run_on_virtual_time(scenario())


def test_refusals_and_failures_are_known_to_the_replica():
    async def scenario():
        lines: list[str] = []
        pool, (replica,) = scheduler(most=99, warn=lines.append)

        async def fail(error):
            with pytest.raises(type(error)):
                async with await pool.lease(LeaseRequest("probe", (0,))):
                    raise error

        await fail(ThrottledError("429"))
        assert lines == ["r0 gets 1 request at a time for now, not 99, more again as it answers: 429"]
        assert (replica.limit.value, replica.life.state) == (1, State.SERVING)
        for _ in range(FAILURES_TO_SUSPECT):
            await fail(TransientError("connection refused"))
        assert replica.life.state is State.SUSPECT

    run_on_virtual_time(scenario())


def test_a_replica_that_asked_to_be_left_alone_gets_nothing_until_then():
    async def scenario():
        pool, replicas = scheduler(count=2, most=99)
        loop = asyncio.get_running_loop()
        sent: list[tuple[float, str]] = []

        async def ask(retry_after_s=None):
            lease = await pool.lease(LeaseRequest("score", (0,)))
            async with lease:
                sent.append((loop.time(), lease.replica))
                if retry_after_s is not None:
                    raise ThrottledError("429", retry_after_s=retry_after_s)

        for retry_after_s in (900.0, 50.0):
            with pytest.raises(ThrottledError):
                await ask(retry_after_s)
        assert {name for _, name in sent} == {"r0", "r1"}
        await asyncio.gather(ask(), ask())
        assert sent[2:] == [(50.0, sent[1][1])] * 2
        replicas[int(sent[1][1][1])].life.move(State.SUSPECT, 50.0)
        await ask()
        assert sent[-1] == (900.0, sent[0][1])

    run_on_virtual_time(scenario())


def test_people_are_told_once_who_asks_for_a_long_pause_and_a_year_holds_up_nobody():
    async def scenario():
        lines: list[str] = []
        pool, (replica,) = scheduler(most=3, warn=lines.append)

        async def ask(pause_s=None):
            async with await pool.lease(LeaseRequest("score", (0,))):
                await asyncio.sleep(1.0)
                if pause_s is not None:
                    raise ThrottledError("429: daily limit", retry_after_s=pause_s)

        await asyncio.gather(*(ask(1800.0) for _ in range(3)), return_exceptions=True)
        assert [line for line in lines if "gets nothing" in line] == [
            "r0 gets nothing for 30 min, as it asks: 429: daily limit"
        ]
        assert replica.status.held_s == 1800.0
        await ask()
        assert asyncio.get_running_loop().time() == 1802.0
        assert replica.status.held_s == 0.0
        with pytest.raises(ThrottledError):
            await ask(366 * 86_400.0)
        await ask()
        assert asyncio.get_running_loop().time() == 1804.0

    run_on_virtual_time(scenario())


def test_a_request_that_never_left_says_nothing_of_its_replica():
    async def scenario():
        pool, (replica,) = scheduler(most=99)
        error = DeadlineExceededError("no turn")
        error.was_sent = False
        with pytest.raises(DeadlineExceededError):
            async with await pool.lease(LeaseRequest("score", (0,))):
                raise error
        assert replica.limit.decreases == 0

    run_on_virtual_time(scenario())


def test_a_role_offers_what_all_its_servers_do():
    worse = capabilities(8, max_top_k=4, exact_entropy=False, candidate_logprobs="none", logprob_noise_nats=0.1)
    offered = combined([capabilities(8), worse])
    assert (offered.max_top_k, offered.exact_entropy, offered.candidate_logprobs) == (4, False, "none")
    assert offered.logprob_noise_nats == 0.1
    assert combined([capabilities(8), capabilities(8, version=None)]).version is None
    assert not combined([capabilities(8), capabilities(8, in_flight_updates=False)]).in_flight_updates


def test_no_role_begins_with_servers_of_different_vocabularies():
    class Other(Server):
        async def capabilities(self, *, deadline):
            return capabilities(8, vocab_fingerprint="g")

    async def start():
        async with ReplicaPool("teacher", {"teacher-1": Server, "teacher-2": Other}):
            pass

    with pytest.raises(ConfigError, match=r"teacher-2 serves another model .vocab_fingerprint g, not simulated"):
        run_on_virtual_time(start())


def test_a_server_that_came_back_as_another_model_is_refused():
    check_same(capabilities(8), "student-2", capabilities(8, max_top_k=4), MODEL)
    with pytest.raises(ConfigError, match=r"student-2 serves another model .vocab_fingerprint g, not simulated"):
        check_same(capabilities(8), "student-2", capabilities(8, vocab_fingerprint="g"), MODEL)
