"""Whether a vLLM server lives. What can be trusted was measured (0.32.0).

/health, /version and /v1/models answer although the engine is frozen; /is_paused (with VLLM_SERVER_DEV_MODE) asks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

from spot_async.errors import DeadlineExceededError, PermanentError, TransientError

from ..shared.held_weights import SentNames
from ..shared.remote import RemoteServer
from .client import NoSuchRouteError, VllmClient

ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
ONE_TOKEN_SHARE = 0.7  # share of the time there is; the rest is for a second look at the counters
TOKENS_COUNTED = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


async def ask_engine(client: VllmClient, names: SentNames, *, deadline: float) -> None:
    """Whether its engine answers, with weights of ours. One token where the server has no developer mode."""
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
    """Whether a token comes, or the engine is seen to work on others: with all its places taken it lets this wait."""
    now = asyncio.get_running_loop().time()
    before = await _tokens_counted(client.server, deadline)
    try:
        soon = now + ONE_TOKEN_SHARE * (deadline - now)
        await client.sample([0], ONE_TOKEN, top_k=0, logprobs=0, deadline=soon)
    except DeadlineExceededError:
        if before is None or await _tokens_counted(client.server, deadline) == before:
            raise


async def _tokens_counted(server: RemoteServer, deadline: float) -> float | None:
    """Tokens that the engine has read and sampled since it started; None where the server does not say."""
    try:
        said = await server.endpoint.get("/metrics", deadline=deadline)
    except PermanentError:
        return None
    counts = TOKENS_COUNTED.findall(said)
    try:
        return sum(map(float, counts)) if counts else None
    except ValueError:  # no numbers
        return None
