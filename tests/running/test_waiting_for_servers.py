"""The start of a run whose servers run already, or will soon: how long it waits for one that is not there yet."""

from __future__ import annotations

import asyncio

import pytest
from replica_incidents import OFFERS

from spot_async.config import ServingConfig
from spot_async.errors import ConfigError, Exchange, UnreachableError
from spot_async.replicas.pool import PeopleListener, ReplicaPool
from spot_async.testing.virtual_time import run_on_virtual_time

pytestmark = pytest.mark.usefixtures("quiet")


class Attached:
    """A backend object of a server that is there from `since_s` on, and is asked at the `moment` given."""

    def __init__(self, since_s, moment):
        self.since_s, self.moment = since_s, moment

    async def __aenter__(self):
        if self.moment == "entering":
            self.ask()
        return self

    async def __aexit__(self, *exc_info): ...

    async def capabilities(self, *, deadline):
        self.ask()
        return OFFERS

    def ask(self):
        if asyncio.get_running_loop().time() < self.since_s:
            error = UnreachableError("teacher/x: nothing answers at h:1: Connection refused", "Connection refused")
            error.exchange = Exchange("http://h:1", "GET", "/x", 0, None)
            raise error


def start(since_s, *, moment="entering", tell=None, are_ours=False):
    """Seconds until all are there."""

    async def run():
        factories = {"teacher": lambda: Attached(since_s, moment)}
        serving = ServingConfig(recovery_timeout_s=30.0)
        async with ReplicaPool("teacher", factories, serving, are_ours=are_ours, people=PeopleListener(waiting=tell)):
            return asyncio.get_running_loop().time()

    return run_on_virtual_time(run())


@pytest.mark.parametrize("moment", ["entering", "asking"])
def test_a_run_waits_for_a_server_that_is_not_there_yet_and_says_so_once(moment):
    said = []
    assert 20.0 <= start(20.0, moment=moment, tell=said.append) < 21.0
    assert said == ["waiting for teacher: nothing answers at http://h:1 yet; up to 30 s"]


def test_a_server_that_never_comes_is_a_wrong_setting_after_the_time_given():
    with pytest.raises(ConfigError) as refused:
        start(31.0, tell=lambda line: None)
    assert str(refused.value) == (
        "teacher.backend.url: nothing answers at http://h:1 for 30 s (Connection refused): start it, or correct the "
        "address"
    )


def test_commands_that_do_not_wait_fail_at_once():
    with pytest.raises(ConfigError, match=r"nothing answers at http://h:1 \(Connection refused\)"):
        start(1.0)


def test_a_server_of_ours_is_not_waited_for_here():
    with pytest.raises(UnreachableError):
        start(1.0, tell=lambda line: None, are_ours=True)
