"""A simulated teacher that follows the student: it takes weights, and what it says is of those."""

from __future__ import annotations

import msgspec

from spot_async.testing.services import SimulatedTeacher
from spot_async.types import ScoreRequest, TokenScores


class FollowingTeacher(SimulatedTeacher):
    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        version = self.version
        self.name = str(version.step or "")  # by which others score otherwise
        return msgspec.structs.replace(await super().score(request, top_k=top_k), version=version)
