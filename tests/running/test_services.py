"""The one way to open services: what is started is left whatever happens, and who only looks changes nothing."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from noted_backend import NOTED

from spot_async.base.tasks import root_cause
from spot_async.config import ModelConfig
from spot_async.config.loading import validate_as
from spot_async.errors import ProcessDiedError
from spot_async.running.services import Companions, StartListener, open_services


@pytest.fixture(autouse=True)
def _nothing_noted():
    NOTED.clear()


def served(**fails):
    """The roles, each with what goes wrong with its server."""
    return {
        role: validate_as(ModelConfig, {"model": "m", "backend": {"kind": "noted_backend:Noted", "fails": each}})
        for role, each in fails.items()
    }


@asynccontextmanager
async def trainer():
    """What starts beside the servers."""
    NOTED.append("trainer entered")
    try:
        yield
    finally:
        NOTED.append("trainer left")


async def test_people_hear_of_the_start_before_it_and_the_student_gets_its_first_weights(tmp_path):
    listener = StartListener(
        starting=lambda backends: NOTED.append(f"starting {', '.join(backends)}"), step=NOTED.append
    )
    async with open_services(
        served(student=""), tmp_path, beside=Companions(entered=[trainer()], listener=listener)
    ) as services:
        assert set(services.capabilities) == set(services.backends) == {"student"}
        NOTED.append("inside")
    assert [
        "starting student",
        "trainer entered",
        "student entered",
        "sending the student's weights to its server",
        "student sent 0.0",
        "inside",
        *NOTED[-2:],
    ] == NOTED
    assert set(NOTED[-2:]) == {"student left", "trainer left"}


async def test_who_only_looks_sends_nothing(tmp_path):
    async with open_services(served(student=""), tmp_path, is_used=False):
        pass
    assert NOTED == ["student entered", "student left"]


@pytest.mark.parametrize("moment", ["entering", "asking"])
@pytest.mark.parametrize("directly", [True, False])
async def test_a_server_that_ends_while_it_starts_takes_all_others_along(moment, directly, tmp_path):
    opening = open_services(
        served(student="", teacher=moment),
        tmp_path,
        directly=directly,
        is_used=False,
        beside=Companions(entered=[trainer()]),
    )
    with pytest.raises((ProcessDiedError, ExceptionGroup)) as failed:
        async with opening:
            NOTED.append("inside")
    assert str(root_cause(failed.value)) == "teacher ended"
    assert "inside" not in NOTED
    assert NOTED.count("student left") == NOTED.count("trainer left") == 1
    assert NOTED.count("teacher entered") == NOTED.count("teacher left")


async def test_a_server_that_ends_later_ends_the_inside(tmp_path):
    with pytest.raises(ExceptionGroup) as failed:
        async with open_services(
            served(student="living"), tmp_path, directly=True, beside=Companions(entered=[trainer()])
        ):
            await asyncio.Event().wait()
    assert str(root_cause(failed.value)) == "student ended"
    assert {"student left", "trainer left"} <= set(NOTED)


@pytest.mark.parametrize("moment", ["starting", "sending weights", "inside"])
async def test_a_run_that_is_stopped_leaves_everything_at_any_moment(moment, tmp_path):
    listener = StartListener(
        starting=lambda backends: stop_at("starting"), step=lambda step: stop_at("sending weights")
    )

    def stop_at(now):
        if now == moment:
            run.cancel()

    async def go_on():
        async with open_services(
            served(student=""), tmp_path, beside=Companions(entered=[trainer()], listener=listener)
        ):
            NOTED.append("inside")
            stop_at("inside")
            await asyncio.Event().wait()

    run = asyncio.create_task(go_on())
    await asyncio.wait([run])
    assert run.cancelled()
    assert ("inside" in NOTED) == (moment == "inside")
    for each in ("student", "trainer"):
        assert NOTED.count(f"{each} entered") == NOTED.count(f"{each} left")
