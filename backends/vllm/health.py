"""Checks whether a vLLM server is alive. Which routes can be trusted was measured with 0.32.0.

/health, /version and /v1/models answer even if the engine is frozen. /is_paused asks the engine, but only with
VLLM_SERVER_DEV_MODE.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

from spot_async.errors import DeadlineExceededError, PermanentError, TransientError

from ..shared.held_weights import ReplyNames
from ..shared.remote import RemoteServer
from .client import NoSuchRouteError, VllmClient

ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
ONE_TOKEN_SHARE = 0.7  # share of the time left for sampling one token; the rest is for a second look at the counters
TOKENS_COUNTED = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


async def ask_engine(client: VllmClient, names: ReplyNames, *, deadline: float) -> None:
    """Raise a `RequestError` unless the engine answers and has weights that we sent.

    Without developer mode this samples one token.
    """
    server = client.server
    try:
        found = await server.get("/is_paused", dict[str, Any], deadline=deadline)
    except NoSuchRouteError:
        await _samples(client, deadline)
        return
    if found.get("is_paused"):
        raise TransientError(f"{server.name}: the server is paused, but not by this run")
    with contextlib.suppress(NoSuchRouteError):
        names.version((await server.get("/weight_info", dict[str, Any], deadline=deadline)).get("weight_version"))


async def _samples(client: VllmClient, deadline: float) -> None:
    """Raise unless a token comes, or the counters show that the engine works on other requests, which go first."""
    now = asyncio.get_running_loop().time()
    before = await _tokens_counted(client.server, deadline)
    try:
        soon = now + ONE_TOKEN_SHARE * (deadline - now)
        await client.sample([0], ONE_TOKEN, top_k=0, logprobs=0, deadline=soon)
    except DeadlineExceededError:
        if before is None or await _tokens_counted(client.server, deadline) == before:
            raise


async def _tokens_counted(server: RemoteServer, deadline: float) -> float | None:
    """Return how many tokens the engine has read and sampled since it started; None if the server does not say."""
    try:
        said = await server.endpoint.get("/metrics", deadline=deadline)
    except PermanentError:
        return None
    counts = TOKENS_COUNTED.findall(said)
    try:
        return sum(map(float, counts)) if counts else None
    except ValueError:  # the counters are not numbers
        return None
