"""The training verifier: the paper's "binary rule-based boxed-answer match".

The last balanced box of the response and the gold answer are equal as normalised strings, or they are not. It is
string work in linear time, so it runs where it is called: no worker, no time-out, no errors.
"""

from __future__ import annotations

from typing import Self

from spot_async.config import PluginSettings
from spot_async.types import Problem, Verdict
from spot_async.verification.extraction import extract_boxed, is_oversized
from spot_async.verification.normalization import normalize_answer


def boxed_match(gold: str, response_text: str) -> Verdict:
    """CORRECT, WRONG, or NO_ANSWER without a box or with an empty one. An oversized answer is WRONG."""
    answer = extract_boxed(response_text)
    if answer is None:
        return Verdict.NO_ANSWER
    if is_oversized(answer):
        return Verdict.WRONG
    normalized = normalize_answer(answer)
    if not normalized:
        return Verdict.NO_ANSWER
    return Verdict.CORRECT if normalized == normalize_answer(gold) else Verdict.WRONG


class BoxedMatch:
    """`boxed_match` as a verifier."""

    class Settings(PluginSettings):
        """There is nothing to set."""

        kind: str = "boxed_match"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        """Immediate, whatever the deadline. UNJUDGED where the problem has no answer."""
        if not problem.answer:
            return Verdict.UNJUDGED
        return boxed_match(problem.answer, response_text)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass
