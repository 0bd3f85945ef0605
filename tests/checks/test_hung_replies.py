"""A reply that hangs while the servers are checked costs one attempt of its stage, and not the whole check."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from spot_async.checks import diagnosis
from spot_async.checks.discovery import Asked
from spot_async.config.schema import ScoreStageConfig, StagesConfig
from spot_async.errors import DeadlineExceededError


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


async def test_a_request_that_hangs_is_sent_again_after_an_attempt_of_its_stage():
    asked = Asked([], [], (), timeout_s=0.1, attempt_timeouts_s={"score": 0.02})
    assert await asked.answer("score", scores := Scores(hangs=2)) == "scores"
    assert len(scores.given_s) == 3
    assert max(scores.given_s) <= 0.02
    with pytest.raises(DeadlineExceededError):
        await asked.answer("score", scores := Scores(hangs=100))
    assert len(scores.given_s) == 5, "for as long as one request may take in all"


async def test_without_a_limit_an_attempt_has_all_the_time():
    asked = Asked([], [], (), timeout_s=0.05, attempt_timeouts_s={"score": 0.01})
    with pytest.raises(DeadlineExceededError):
        await asked.answer("rollout", scores := Scores(hangs=100))
    assert len(scores.given_s) == 1


async def test_the_limits_are_those_of_the_run_s_stages():
    config = SimpleNamespace(stages=StagesConfig(score=ScoreStageConfig(attempt_timeout_s=7.0)))
    plan = SimpleNamespace(schedule=[], stop_token_ids=(), common=SimpleNamespace(limit=None))
    asked = await diagnosis._asked(config, plan, None, SimpleNamespace(generation=False))
    assert asked.attempt_timeouts_s == {"score": 7.0}
