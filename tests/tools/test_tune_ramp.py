"""The ramp on virtual time, against servers whose capacity is known."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_async.errors import BudgetSpentError, PermanentError, ThrottledError
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.simulate.measured import Ramp, is_flat
from spot_async.tools.tune.mix import Request
from spot_async.tools.tune.ramp import RampLimits, ramp

LIMITS = RampLimits(seconds=60.0, most=256)
SERVICE_S = {"rollout": 0.4, "probe": 0.1}


class Server:
    """Takes `slots` requests at a time, each for its stage's time; the others wait."""

    def __init__(self, slots: int, refuse_above: int | None = None, refusal: Exception | None = None) -> None:
        self._free = asyncio.Semaphore(slots)
        self._refuse_above = refuse_above
        self._refusal = refusal
        self.in_flight = self.most_in_flight = self.sent = 0

    async def answer(self, stage: str) -> int:
        self.sent += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self._refusal is not None and self._refuse_above is not None and self.in_flight > self._refuse_above:
                raise self._refusal
            async with self._free:
                await asyncio.sleep(SERVICE_S[stage])
            return 10
        finally:
            self.in_flight -= 1


def requests(answer: Callable[[str], Awaitable[int]]) -> Iterator[Request]:
    """One rollout to four probes."""
    for stage in itertools.cycle(["rollout", "probe", "probe", "probe", "probe"]):
        yield Request(stage, lambda stage=stage: answer(stage))


def ramped(make: Callable[[], Server], limits: RampLimits = LIMITS) -> tuple[Ramp, Server]:
    async def main() -> tuple[Ramp, Server]:
        server = make()
        found = await ramp("student", requests(server.answer), limits, lambda server, level: None)
        await asyncio.sleep(0)
        assert server.in_flight == 0, "requests were left behind"
        return found, server

    return run_on_virtual_time(main())


@pytest.mark.parametrize("slots", [1, 3, 24, 64, 100])
def test_the_ramp_of_a_server_with_slots_ends_when_two_doublings_brought_nothing(slots):
    found, server = ramped(lambda: Server(slots))
    assert found.ended == ("flat" if slots < 100 else "demand")
    assert found.is_whole
    assert 2 * slots <= found.levels[-1].concurrency <= max(4, 8 * slots)
    best = slots / ((0.4 + 4 * 0.1) / 5)  # requests per second
    assert max(level.throughput for level in found.levels) == pytest.approx(best, rel=0.1)
    for level in found.levels:  # Little's law holds of what was counted, stage by stage
        in_flight = sum(load.busy_s for load in level.stages.values()) / level.seconds
        assert in_flight == pytest.approx(level.concurrency, rel=0.15)
    assert server.most_in_flight <= 256


def test_answers_from_before_a_level_was_reached_are_left_out():
    found, _ = ramped(lambda: Server(64))
    alone = found.levels[0]
    assert alone.concurrency == 1
    assert alone.throughput == pytest.approx(1 / 0.16, rel=0.1)
    # What other levels left in flight would be slow to answer, and make this one's latencies longer.
    assert max(level.p95_s for level in found.levels if level.concurrency <= 32) <= 0.4 + 1e-6


def test_a_run_that_never_has_more_in_flight_ends_the_ramp():
    found, server = ramped(lambda: Server(1000), RampLimits(seconds=60.0, most=48))
    assert (found.levels[-1].concurrency, found.ended, server.most_in_flight) == (48, "demand", 48)
    assert found.is_whole


@pytest.mark.parametrize(
    ("refuse_above", "refusal", "ended", "levels"),
    [
        # 16 is only the best that was measured: its throughput still rose.
        (20, ThrottledError("teacher: 429 slow down"), "throttled", [1, 2, 4, 8, 16]),
        (0, PermanentError("teacher: 400 bad"), "failed", []),
        (4, BudgetSpentError("teacher: 10 of 10 spent"), "budget", [1, 2, 4]),
    ],
)
def test_a_refusal_ends_the_ramp_with_what_was_measured_and_is_named(refuse_above, refusal, ended, levels):
    found, server = ramped(lambda: Server(1000, refuse_above, refusal))
    assert (found.ended, found.failure, found.is_whole) == (ended, str(refusal), False)
    assert [level.concurrency for level in found.levels] == levels
    assert server.most_in_flight <= 32
    assert levels or server.sent == 3


def test_a_server_that_would_refuse_more_than_it_gains_from_is_measured_whole():
    found, _ = ramped(lambda: Server(4, refuse_above=70, refusal=ThrottledError("teacher: 429 slow down")))
    assert found.ended == "flat"


def test_no_more_requests_are_sent_than_allowed():
    found, server = ramped(lambda: Server(64), RampLimits(seconds=1e6, most=256, requests=500))
    assert found.ended == "requests"
    assert server.sent == found.sent == 500
    assert found.levels
    assert not found.is_whole


def test_a_slow_server_is_left_when_its_time_is_over():
    found, _ = ramped(lambda: Server(64), RampLimits(seconds=0.5, most=256))
    assert (found.ended, found.is_whole) == ("time", False)


def test_answers_that_take_no_time_need_no_ramp():
    async def main() -> Ramp:
        async def at_once(stage: str) -> int:
            return 0

        return await ramp("verifier", requests(at_once), RampLimits(seconds=2.0, most=64), lambda server, level: None)

    found = asyncio.run(main())
    assert (found.ended, len(found.levels)) == ("instant", 1)


def test_a_bug_is_not_taken_for_a_failure_of_the_server():
    with pytest.raises(ExceptionGroup) as raised:
        ramped(lambda: Server(8, refuse_above=2, refusal=ZeroDivisionError()))
    assert raised.group_contains(ZeroDivisionError)


@given(st.floats(1e-3, 1e3))
def test_a_level_that_was_disturbed_on_the_way_up_does_not_end_it(unit):
    assert not is_flat([unit * each for each in (1.0, 2.0, 4.0, 2.0)])
    assert not is_flat([unit * each for each in (1.0, 2.0, 4.0, 2.0, 16.0)])
    assert is_flat([unit * each for each in (1.0, 2.0, 4.0, 4.0, 4.1)])
