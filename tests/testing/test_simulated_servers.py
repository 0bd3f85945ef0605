"""What simulated servers do with requests in flight when new weights come, and what a client sees of their faults."""

from __future__ import annotations

import asyncio
from typing import get_args

import numpy as np
import pytest
from faults.plan import planned_faults
from faults.servers import Rates, SimulatedReplica, SimulatedServer, Update
from shrunk import shrunk

from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    ServerRestartedError,
    ThrottledError,
    TransientError,
    VersionMismatchError,
)
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import SamplingSettings, ScoreRequest, VersionSpan, WeightSnapshot, WeightVersion

FIRST, SECOND = WeightVersion(0, 0), WeightVersion(0, 1)
SNAPSHOT = WeightSnapshot(directory="weights", version=SECOND)
SAMPLING = SamplingSettings(max_tokens=64, stop_token_ids=(1,), seed=1)
PROMPT = np.arange(5, dtype=np.int32)
FAR = 1e6


def with_server(scenario, **settings):
    async def run():
        server = SimulatedServer("student", Rates(start_s=0.0, update_s=10.0, tokens_per_s_each=1.0), **settings)
        async with SimulatedReplica(server, mean_tokens=60) as replica:
            return await scenario(server, replica)

    return run_on_virtual_time(run())


async def beside_an_update(replica, asked, at_s=12.5):
    """Return what a request gets that sees an update 12.5 s after it was sent, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    request, began_s = asyncio.ensure_future(asked), loop.time()
    await asyncio.sleep(at_s)
    await replica.update_weights(SNAPSHOT, deadline=FAR)
    (found,) = await asyncio.gather(request, return_exceptions=True)
    return found, loop.time() - began_s


@pytest.mark.parametrize("update", ["keep", "retract"])
def test_a_response_that_sees_an_update_waits_for_it_and_goes_on_with_the_new_weights(update):
    async def undisturbed(server, replica):
        return await replica.generate(PROMPT, SAMPLING, deadline=FAR)

    async def updated(server, replica):
        return await beside_an_update(replica, replica.generate(PROMPT, SAMPLING, deadline=FAR))

    expected, (found, seconds) = with_server(undisturbed, update=update), with_server(updated, update=update)
    tokens = len(expected.token_ids)
    assert found.version_spans == (VersionSpan(0, 10, FIRST), VersionSpan(10, tokens, SECOND))
    assert seconds == pytest.approx(tokens + 2 + 10, abs=0.1)  # it costs two tokens more, and the update takes 10 s
    assert (found.token_ids[:10] == expected.token_ids[:10]).all()
    assert (found.token_ids[10:] != expected.token_ids[10:]).any()
    assert found.token_ids[-1] == expected.token_ids[-1]  # it ends as it would have


def test_a_server_that_aborts_ends_what_is_in_flight_and_one_that_drains_allows_none():
    async def scenario(server, replica):
        return (await beside_an_update(replica, replica.generate(PROMPT, SAMPLING, deadline=FAR)))[0]

    assert type(with_server(scenario, update="abort")) is TransientError
    with pytest.raises(AssertionError, match="gets weights with 1 requests in flight"):
        with_server(scenario, update="drain")
    assert {"keep", "retract", "abort", "drain"} == set(get_args(Update))


def test_candidates_are_of_one_version_each():
    async def scenario(server, replica):
        positions, ids = np.array([0], np.int32), np.array([[3]], np.int32)

        def asked(version):
            return replica.candidate_logprobs(
                ScoreRequest(PROMPT, PROMPT, 1.0, FAR), positions, ids, expected_version=version
            )

        error, _ = await beside_an_update(replica, asked(None), at_s=1.0)
        assert isinstance(error, VersionMismatchError)
        assert error.failure_class == "transient"
        await asked(None)
        with pytest.raises(VersionMismatchError):
            await asked(FIRST)

    with_server(scenario, update="keep")


@pytest.mark.parametrize(
    ("fault", "kind", "status"),
    [
        ("bad request", PermanentError, 400),
        ("server error", TransientError, 500),
        ("throttled", ThrottledError, None),
        ("nonsense", PoisonedReplyError, 200),
        ("reset", TransientError, None),
        ("cut off", TransientError, None),
    ],
)
def test_one_reply_fails_as_a_client_would_see_it_and_the_next_is_right(fault, kind, status):
    async def scenario(server, replica):
        server.reply_faults.append(fault)
        with pytest.raises(kind) as raised:
            await replica.generate(PROMPT, SAMPLING, deadline=FAR)
        assert type(raised.value) is kind
        assert getattr(raised.value.exchange, "status", None) == status
        await replica.generate(PROMPT, SAMPLING, deadline=FAR)

    with_server(scenario)


@pytest.mark.parametrize(
    ("fault", "kind", "holds"),
    [
        ("refused", TransientError, FIRST),
        ("reset", TransientError, FIRST),
        ("unheard", TransientError, SECOND),
        ("hangs", DeadlineExceededError, FIRST),
        ("dies", TransientError, FIRST),
    ],
)
def test_one_update_fails_and_the_server_holds_the_old_weights_or_the_new(fault, kind, holds):
    async def scenario(server, replica):
        server.update_faults.append(fault)
        with pytest.raises(kind):
            await replica.update_weights(SNAPSHOT, deadline=50.0)
        assert server.version == holds
        assert server.is_running == (fault != "dies")
        if server.is_running:
            await replica.update_weights(SNAPSHOT, deadline=FAR)
            assert server.version == SECOND

    with_server(scenario)


def test_a_server_that_somebody_else_starts_again_is_noticed_at_its_first_answer():
    async def scenario(server, replica):
        server.kill()
        await server.start("foreign")
        for asked in (
            replica.generate(PROMPT, SAMPLING, deadline=FAR),
            replica.ping(deadline=FAR),
            replica.update_weights(SNAPSHOT, deadline=FAR),
        ):
            with pytest.raises(ServerRestartedError):
                await asked

    with_server(scenario)


def test_a_failure_is_shrunk_to_the_faults_that_it_needs():
    faults = next(faults for seed in range(100) if len(faults := planned_faults(seed)) == 6)
    asked = []

    def fails(left):
        asked.append(left)
        return {1, 4} <= {fault.number for fault in left}

    assert [fault.number for fault in shrunk(faults, fails)] == [1, 4]
    assert len(asked) <= 6 * 5
