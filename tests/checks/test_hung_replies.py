"""A reply that hangs while the servers are checked costs one attempt of its stage, and not the whole check."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from spot_async.backends.shared.remote import Server
from spot_async.base.retry import CAPABILITIES_TIMEOUT_S, QUESTION_TIMEOUT_S
from spot_async.checks import diagnosis
from spot_async.checks.questions import Asked
from spot_async.config.schema import StagesConfig
from spot_async.errors import DeadlineExceededError, FailureClass, ThrottledError
from spot_async.testing.virtual_time import run_on_virtual_time


class Scores:
    """Answers after so many requests that hang until their deadline."""

    def __init__(self, hangs: int) -> None:
        self.hangs, self.given_s = hangs, []

    async def __call__(self, deadline: float) -> str:
        now_s = asyncio.get_running_loop().time()
        self.given_s.append(deadline - now_s)
        if len(self.given_s) > self.hangs:
            return "scores"
        await asyncio.sleep(deadline - now_s)
        raise DeadlineExceededError("no reply before the deadline")


def test_a_request_that_hangs_is_sent_again_after_an_attempt():
    asked = Asked([], [], (), timeout_s=9.5, attempt_timeout_s=2.0)
    assert run_on_virtual_time(asked.answer("score", scores := Scores(hangs=2))) == "scores"
    assert len(scores.given_s) == 3
    assert max(scores.given_s) <= 2.0
    with pytest.raises(DeadlineExceededError):
        run_on_virtual_time(asked.answer("score", scores := Scores(hangs=100)))
    assert len(scores.given_s) == 5, "for as long as one request may take in all"


def test_without_a_limit_an_attempt_has_all_the_time():
    asked = Asked([], [], (), timeout_s=9.5)
    with pytest.raises(DeadlineExceededError):
        run_on_virtual_time(asked.answer("score", scores := Scores(hangs=100)))
    assert len(scores.given_s) == 1


async def test_the_limits_are_those_of_the_run_s_stages():
    config = SimpleNamespace(stages=StagesConfig(attempt_timeout_s=7.0))
    plan = SimpleNamespace(schedule=[], stop_token_ids=(), common=SimpleNamespace(limit=None))
    asked = await diagnosis._asked(config, plan, None, SimpleNamespace(generation=False))
    assert asked.attempt_timeout_s == 7.0


def no_turn():
    """As an account raises it, whose limits let others go first."""
    late = DeadlineExceededError("no turn before the deadline")
    late.was_sent, late.failure_class = False, FailureClass.THROTTLED
    return late


def test_a_question_waits_for_its_turn_however_many_are_asked_before_it():
    asked = Asked([], [], ())

    async def score(deadline):
        turn_s, now_s = 10 * QUESTION_TIMEOUT_S, asyncio.get_running_loop().time()
        await asyncio.sleep(min(deadline, turn_s) - now_s)
        if deadline < turn_s:
            raise no_turn()
        return "scores"

    assert run_on_virtual_time(asked.answer("score", score)) == "scores"


class Quiet(Server):
    """A server of which only `get` is asked."""

    _launch = connection = None

    def _decoded(self, reply, kind):
        return reply


@pytest.mark.parametrize("refusal", [None, ThrottledError("429", retry_after_s=61.0), no_turn()])
def test_each_question_of_a_start_has_time_of_its_own(refusal):
    server, deadlines = Quiet("http://127.0.0.1:1", SimpleNamespace(role="teacher", name="teacher")), []

    async def get(path, *, deadline):
        deadlines.append(deadline)
        await asyncio.sleep(CAPABILITIES_TIMEOUT_S / 3)
        if refusal is not None and len(deadlines) == 1:
            raise refusal
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceededError("no reply before the deadline")
        return path

    async def start():
        server.endpoint = SimpleNamespace(get=get, reading=lambda *request: nullcontext())
        with server.starting():
            return [await server.get(path, str, deadline=CAPABILITIES_TIMEOUT_S) for path in "abcd"]

    assert run_on_virtual_time(start()) == [*"abcd"]
    assert deadlines == sorted(deadlines)
