"""Asks a real SGLang server on a CPU through the backend, and compares the replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from parity import expect_of_samples, nats_off, nats_off_topk, own, soon
from server_process import WAIT_S, RunningServer

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.types import SamplingSettings, ScoreRequest, WeightVersion

VOCAB = 512
END = 2
FIRST, SECOND = WeightVersion(0, 0), WeightVersion(0, 1)

Rows = Callable[[Path, npt.NDArray[Any], float], npt.NDArray[np.float64]]
Connect = Callable[..., AbstractAsyncContextManager[SglangBackend]]


def tokens(count: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, 480, count).astype(np.int32)


def sampling(max_tokens: int, **changes: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": max_tokens, "stop_token_ids": (END,), "seed": 1, **changes})


def endless(max_tokens: int) -> SamplingSettings:
    """For a request that must still be under way later: no token that happens to be drawn ends it."""
    return sampling(max_tokens, stop_token_ids=())


def rows_of(dense_logprobs: Callable[..., npt.NDArray[np.float32]]) -> Rows:
    """`rows(model, ids, temperature)`: log-probabilities (len(ids), V) of a plain float32 forward."""

    def compute(model: Path, ids: npt.NDArray[Any], temperature: float) -> npt.NDArray[np.float64]:
        scaled = dense_logprobs(model, ids.tolist()).astype(np.float64) / temperature
        normalizer = np.log(np.exp(scaled).sum(-1, keepdims=True))
        return np.asarray(scaled - normalizer)

    return compute


def connecting(run_directory: Path) -> Connect:
    """`connect(server, url=..., **settings)`: the backend, attached."""

    @asynccontextmanager
    async def connected(
        server: RunningServer, *, url: str | None = None, **settings: Any
    ) -> AsyncIterator[SglangBackend]:
        backend = SglangBackend(
            SglangBackend.Settings(url=url or server.url, **settings),
            role="student",
            model=str(server.model),
            run_directory=run_directory,
        )
        async with backend:
            yield backend

    return connected


async def wait_until(server: RunningServer, count: int, *, tokens: int = 0) -> None:
    """Until so many requests (`endless` ones) are under way on the server, of at least so many tokens together."""
    seen, held = -1, 0
    try:
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient(timeout=None) as client:
            while seen != count or held < tokens:
                loads = (await client.get(server.url + "/v1/loads")).json()["loads"]
                seen = sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads)
                held = sum(each["num_used_tokens"] for each in loads)
                await asyncio.sleep(0.01)  # the server needs the cores, too
    except TimeoutError:
        pytest.fail(f"after {WAIT_S:g} s the server has {seen} requests of {held} tokens, not {count} of {tokens}")


async def check_everything(backend: SglangBackend, model: Path, rows: Rows, version: WeightVersion) -> None:
    """Rollouts, scores, single positions and candidates of one model agree with its forward."""
    for case in [(3, 40, 1.0), (150, 200, 1.0), (20, 60, 0.6)]:
        await expect_of_samples(partial(largest_difference, backend, model, rows, version, *case))


async def largest_difference(
    backend: SglangBackend, model: Path, rows: Rows, version: WeightVersion, count: int, length: int, temperature: float
) -> float:
    """Of all log-probabilities of one rollout and its scores, in nats of the logits: at temperature 1."""
    prompt = tokens(count, length)
    settings = sampling(length, temperature=temperature, stop_token_ids=())
    generation = await backend.generate(prompt, settings, top_k=8, deadline=soon())
    response = generation.token_ids
    wanted = rows(model, np.concatenate([prompt, response]), temperature)[count - 1 : -1]
    entropy = -(np.exp(wanted) * wanted).sum(-1)
    assert len(response) == length
    assert [span.version for span in generation.version_spans] == [version]
    found = [nats_off(generation, wanted)]

    positions = np.array([0, 7, length - 1], np.int32)
    candidates = np.random.default_rng(length).permuted(np.tile(np.arange(VOCAB), (3, 1)), axis=1)[:, :16]
    asked = ScoreRequest(prompt, response, temperature, soon())
    chosen = await backend.candidate_logprobs(asked, positions, candidates.astype(np.int32), expected_version=version)
    found.append(np.abs(chosen - wanted[positions[:, None], candidates]).max())

    at = await backend.score_at(ScoreRequest(prompt, response, temperature, soon()), positions, top_k=VOCAB)
    found.append(nats_off_topk(at.topk_ids, at.topk_logprobs, wanted[positions]))
    np.testing.assert_allclose(at.entropy_lower, entropy[positions], atol=1e-4)
    np.testing.assert_allclose(at.entropy_upper, entropy[positions], atol=1e-4)

    if temperature == 1.0:
        scores = await backend.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=16)
        found += [
            np.abs(scores.logprobs - own(wanted, response)).max(),
            nats_off_topk(scores.topk_ids, scores.topk_logprobs, wanted),
        ]
        assert (scores.entropy_lower <= entropy).all()
        assert (entropy <= scores.entropy_upper).all()
    return float(np.max(found)) * temperature  # NaN where one of them is
