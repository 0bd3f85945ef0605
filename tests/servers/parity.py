"""What tests of every server compare: replies with a model's own next-token log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spot_async.types import Generation

PARITY_NATS = 2e-5  # in float32

Rows = npt.NDArray[np.float32]
Dense = Callable[[Path, Any], Rows]  # the fixture dense_logprobs


def soon(seconds: float = 300.0) -> float:
    """A deadline that only what hangs passes, however busy the machine is."""
    return asyncio.get_running_loop().time() + seconds


def decisions(rows: Rows, prompt: Any, response: Any) -> Rows:
    """The rows (T, V) that decide the response's tokens."""
    return rows[len(prompt) - 1 : len(prompt) + len(response) - 1]


def own(rows: Rows, tokens: Any) -> npt.NDArray[np.float32]:
    return rows[np.arange(len(tokens)), np.asarray(tokens)]


def expect_rollout(reply: Generation, rows: Rows) -> None:
    """Log-probabilities and top-k of a response are those of `rows` (T, V)."""
    np.testing.assert_allclose(reply.logprobs, own(rows, reply.token_ids), rtol=0, atol=PARITY_NATS)
    assert reply.topk_ids is not None
    assert reply.topk_logprobs is not None
    expect_topk(reply.topk_ids, reply.topk_logprobs, rows)


def expect_topk(ids: Any, logprobs: Any, rows: Rows) -> None:
    """The likeliest tokens (N, K) of `rows` (N, V), in order."""
    best = -np.sort(-rows, axis=1)[:, : ids.shape[1]]
    np.testing.assert_allclose(logprobs, best, rtol=0, atol=PARITY_NATS)
    served = np.take_along_axis(rows, ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(logprobs, served, rtol=0, atol=PARITY_NATS)
