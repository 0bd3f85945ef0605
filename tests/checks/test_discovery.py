"""What is asked of a server again: no reading of a row counts as the right one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from spot_async.checks.discovery import Asked, recomputed, score_noise
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
