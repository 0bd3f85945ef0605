"""Asks a stage for a verdict, as a prompt's coroutine and an evaluation both do."""

from __future__ import annotations

from spot_async.base.retry import VERIFY_ATTEMPTS
from spot_async.base.waiting_room import Priority
from spot_async.errors import DeadlineExceededError
from spot_async.protocols import Verifier
from spot_async.stages.plugin_contract import verify
from spot_async.stages.stage import Stage
from spot_async.types import Problem, Verdict


async def ask_verdict(stage: Stage[Verifier], priority: Priority, problem: Problem, response_text: str) -> Verdict:
    """Return a verdict. A missing one is asked for once more. When the deadline passes, it counts as missing."""
    verdict = Verdict.TIMEOUT
    for _ in range(VERIFY_ATTEMPTS):
        try:
            verdict = await stage.ask(
                priority, lambda verifier, deadline: verify(verifier, problem, response_text, deadline=deadline)
            )
        except DeadlineExceededError:
            verdict = Verdict.TIMEOUT
        else:
            if verdict.is_missing:
                stage.note_missing(f"verdict {verdict}")
        if not verdict.is_missing:
            break
    return verdict
