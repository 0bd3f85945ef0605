"""The training verifier: the paper's "binary rule-based boxed-answer match".

It compares the response's last balanced box with the gold answer as normalised strings. That takes linear time, so it
needs no worker process and no timeout, and it never fails.
"""

from __future__ import annotations

from spot_async.base.tasks import Opened
from spot_async.config import PluginSettings
from spot_async.types import Problem, Verdict
from spot_async.verification.normalization import boxed_answers, same_answer


def boxed_match(gold: str, response_text: str) -> Verdict:
    """Return CORRECT or WRONG, or NO_ANSWER if there is no box or it is empty.

    Several boxes at the end may be a list.
    """
    answers = boxed_answers(response_text)
    if any(same_answer(gold, answer) for answer in answers):
        return Verdict.CORRECT
    return Verdict.WRONG if answers else Verdict.NO_ANSWER


class BoxedMatch(Opened):
    """`boxed_match` as a verifier."""

    class Settings(PluginSettings):
        """There is nothing to set."""

        READS_BOX = True
        kind: str = "boxed_match"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        """Judge at once, whatever the deadline. UNJUDGED where the problem has no answer."""
        if not problem.answer:
            return Verdict.UNJUDGED
        return boxed_match(problem.answer, response_text)
