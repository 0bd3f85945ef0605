"""Compares servers' replies with a model's own next-token log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spot_async.testing.conformance.contract import A_LITTLE
from spot_async.types import Generation

PARITY_NATS = 2e-5  # in float32

Rows = npt.NDArray[np.floating[Any]]
Dense = Callable[[Path, Any], Rows]  # the fixture dense_logprobs


def soon(seconds: float = 300.0) -> float:
    """A deadline that only what hangs passes, however busy the machine is."""
    return asyncio.get_running_loop().time() + seconds


def decisions(rows: Rows, prompt: Any, response: Any) -> Rows:
    """The rows (T, V) that decide the response's tokens."""
    return rows[len(prompt) - 1 : len(prompt) + len(response) - 1]


def own(rows: Rows, tokens: Any) -> npt.NDArray[np.float32]:
    return rows[np.arange(len(tokens)), np.asarray(tokens)]


async def expect_of_samples(measure: Callable[[], Awaitable[float]]) -> None:
    """`measure` draws samples and returns how far off they are, in nats.

    Rounding in float32 alone takes about one position of 200,000 beyond the bound (2.4e-5 is the largest seen), and no
    server draws the same twice under another load. So a draw that is little beyond it is replaced, once, as
    `spot_async.testing.conformance` does.
    """
    nats = await measure()
    if PARITY_NATS < nats <= A_LITTLE * PARITY_NATS:
        nats = await measure()
    assert nats <= PARITY_NATS, f"{nats:.2g} nats off"


def expect_rollout(reply: Generation, rows: Rows) -> None:
    """Log-probabilities and top-k of a response are those of `rows` (T, V)."""
    nats = nats_off(reply, rows)
    assert nats <= PARITY_NATS, f"{nats:.2g} nats off"


def nats_off(reply: Generation, rows: Rows) -> float:
    """The largest difference of its log-probabilities and top-k to `rows` (T, V)."""
    assert reply.topk_ids is not None
    assert reply.topk_logprobs is not None
    of_own = np.abs(reply.logprobs - own(rows, reply.token_ids)).max()
    return float(np.max([of_own, nats_off_topk(reply.topk_ids, reply.topk_logprobs, rows)]))  # NaN where one is


def expect_topk(ids: Any, logprobs: Any, rows: Any) -> None:
    """The likeliest tokens (N, K) of `rows` (N, V), in order."""
    nats = nats_off_topk(ids, logprobs, rows)
    assert nats <= PARITY_NATS, f"{nats:.2g} nats off"


def nats_off_topk(ids: Any, logprobs: Any, rows: Any) -> float:
    """The largest difference among the likeliest of each row, whose ids may differ where two are as good as equal."""
    best = -np.sort(-rows, axis=-1)[:, : ids.shape[1]]
    served = np.take_along_axis(rows, ids.astype(np.int64), axis=-1)
    return float(np.abs([logprobs - best, logprobs - served]).max())
