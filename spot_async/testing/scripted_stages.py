"""Stands in for the stages of one prompt, with answers that a test chooses, to see what a policy makes of them.

    stages = ScriptedStages(generation([5, 6, 1], logprobs=[-1.0, -2.0, -0.5]), token_scores([-0.5, -3.0, -0.5]))
    (sample,) = await policy.supervise(prompt, stages)

Give `token_scores` the entropy and the candidates too, if the policy looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from spot_async.models.common_vocabulary import EndTokens
from spot_async.testing.services import END_TOKEN, generation, token_scores
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    ScoredPositions,
    TokenScores,
    Verdict,
    WeightVersion,
)


class ScriptedStages:
    """`protocols.PromptStages` that give the same response and scores each time, and note what they were asked."""

    student: Capabilities | None = None  # None: nobody said what servers offer, so a policy asks for exact values
    teacher: Capabilities | None = None
    ends = EndTokens((END_TOKEN,), (END_TOKEN,), "replace")

    def __init__(
        self,
        response: Generation | None = None,
        scores: TokenScores | None = None,
        *,
        verdict: Verdict = Verdict.WRONG,
        verdicts: Mapping[tuple[int, ...], Verdict] | None = None,
    ) -> None:
        """`verdicts` are by the token ids of a whole response or branch; all others get `verdict`."""
        self.response = response or generation([END_TOKEN])
        self.scores = scores or token_scores(np.zeros(len(self.response.token_ids)))
        self.candidates: list[tuple[list[int], list[list[int]]]] = []  # positions and ids the student was asked about
        self.probed: list[tuple[int, int, int]] = []  # position, candidate and number of each probe
        self.verified: list[tuple[int, ...]] = []
        self._verdict = verdict
        self._verdicts = verdicts or {}

    async def rollout(self, *, n: int = 0, top_k: int = 0) -> Generation:
        return self.response

    async def teacher_response(self) -> Generation:
        return self.response

    async def score(self, response_ids: IntArray, *, top_k: int) -> TokenScores:
        narrow = {"topk_ids": self.scores.topk_ids[:, :top_k], "topk_logprobs": self.scores.topk_logprobs[:, :top_k]}
        return msgspec.structs.replace(self.scores, **narrow)

    async def score_at(self, response_ids: IntArray, positions: IntArray, *, top_k: int) -> ScoredPositions:
        return ScoredPositions(
            topk_ids=self.scores.topk_ids[positions, :top_k],
            topk_logprobs=self.scores.topk_logprobs[positions, :top_k],
            entropy_lower=self.scores.entropy_lower[positions],
            entropy_upper=self.scores.entropy_upper[positions],
        )

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        return self.response.logprobs

    async def candidate_logprobs(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        version: WeightVersion | None = None,
    ) -> FloatArray:
        """Return a probability of one in twenty for every candidate."""
        assert version is None or version == self.response.version_spans[-1].version
        self.candidates.append((positions.tolist(), candidate_ids.tolist()))
        return np.full(candidate_ids.shape, np.log(0.05), np.float32)

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        """Return the n-th continuation after a candidate, which is the token 20 + n and then the end."""
        self.probed.append((position, candidate_id, n))
        return generation([20 + n, END_TOKEN])

    async def verify(self, response_ids: IntArray) -> Verdict:
        token_ids = tuple(response_ids.tolist())
        self.verified.append(token_ids)
        return self._verdicts.get(token_ids, self._verdict)

    def decode(self, token_ids: IntArray) -> str:
        return " ".join(map(str, token_ids.tolist()))
