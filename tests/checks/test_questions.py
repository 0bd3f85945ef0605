"""What is asked of a server again: no reading of a row counts as the right one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from spot_async.checks.questions import Asked, recomputed, round_trip_s, score_noise, score_temperature
from spot_async.testing import run_on_virtual_time
from spot_async.testing.services import token_scores
from spot_async.types import ScoreRequest, TokenScores

IDS = np.arange(4, dtype=np.int32)
ASKED = Asked([IDS], [IDS], ())


class Drifting:
    """Scores whose first reading lies in the middle of the others."""

    def __init__(self) -> None:
        self.nats = itertools.cycle([0.1, 0.2, 0.0])

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        rows = np.repeat(-np.arange(1.0, 5.0)[:, None], 1 + top_k, 1) - next(self.nats)
        values = rows.astype(np.float32)
        top = values[:, 1:]
        return token_scores(values[:, 0], topk_ids=np.zeros_like(top), topk_logprobs=top)


async def test_noise_is_how_far_all_readings_lie_apart() -> None:
    server: Any = Drifting()
    noise = await score_noise(server, ASKED, 3)
    assert noise is not None
    assert (noise.alone, noise.largest) == pytest.approx((0.2, 0.2), abs=1e-5)
    np.testing.assert_allclose(noise.ranges, 0.2, atol=1e-5)
    differences = await recomputed([Drifting()], ASKED, top_k=3, max_tokens=4, speaks=False)
    assert np.abs(differences).max() == pytest.approx(0.2, abs=1e-5)


class Warm(Drifting):
    """The same at the request's temperature: its noise is not the temperature's doing."""

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        scores = await super().score(request, top_k=top_k)
        top = scores.topk_logprobs / np.float32(request.temperature)
        return token_scores(scores.logprobs, topk_ids=scores.topk_ids, topk_logprobs=top)


@pytest.mark.parametrize(
    ("server", "noise", "seen"), [(Drifting, 0.2, None), (Drifting, 0.0, "request"), (Warm, 0.2, "request")]
)
async def test_noise_is_not_taken_for_another_temperature(
    server: type[Drifting], noise: float, seen: str | None
) -> None:
    assert await score_temperature(server(), ASKED, noise) == seen


def test_a_machine_that_is_busy_at_most_requests_is_not_taken_for_a_far_server() -> None:
    class Busy(Drifting):
        waits = itertools.cycle([0.3, 0.3, 0.001, 0.3, 0.3])

        async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
            await asyncio.sleep(next(self.waits))
            return await super().score(request, top_k=top_k)

    assert run_on_virtual_time(round_trip_s(Busy(), ASKED, scores=True)) == pytest.approx(0.001)
