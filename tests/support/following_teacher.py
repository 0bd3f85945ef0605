"""A simulated teacher that follows the student: it takes weights, and what it says is of those."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from spot_async.testing.services import INITIAL_VERSION, SimulatedTeacher
from spot_async.types import ScoreRequest, TokenScores, WeightSnapshot, WeightVersion


@dataclass
class FollowingTeacher(SimulatedTeacher):
    version: WeightVersion = INITIAL_VERSION

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        version = self.version
        self.name = str(version.step or "")  # by which others score otherwise
        return msgspec.structs.replace(await super().score(request, top_k=top_k), version=version)

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        await asyncio.sleep(self.latency.base_s)
        self.version = snapshot.version
