"""Whether a server lives, by questions that cost next to nothing, do not wait behind its work, and do not lie.

What can be trusted was measured (vLLM 0.32.0, SGLang 0.5.23). Both answer from a process of their own in front of
the engine, so most routes answer although the engine is frozen: vLLM's /health, /version and /v1/models, SGLang's
/ready, /model_info and /v1/loads. SGLang's /health generates a token, takes a second, and fails while it is paused.
What has to ask the engine itself is answered between two of its steps, however many requests wait: vLLM's /is_paused
(with VLLM_SERVER_DEV_MODE) and SGLang's /server_info.

While an engine loads weights it answers nothing; then only the process in front is asked (`Standstill`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from spot_async.errors import DeadlineExceededError, PermanentError, RequestError, ThrottledError, TransientError

from .held_weights import SentNames
from .remote import RemoteServer
from .sglang_weights import ModelInfo
from .vllm_client import NoSuchRouteError, VllmClient

ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
ONE_TOKEN_SHARE = 0.7  # share of the time there is; the rest is for a second look at the counters
TOKENS_COUNTED = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)

Question = Callable[[], Awaitable[object]]


class Standstill:
    """When an engine is not to be asked, because its server loads weights or sleeps on our behalf."""

    def __init__(self) -> None:
        self._under_way = 0
        self._asleep = False
        self._changes = 0

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around an update of weights."""
        self._under_way += 1
        self._changes += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def sleeping(self, asleep: bool) -> None:
        """To be said before the server is sent to sleep, and once it is awake."""
        self._asleep = asleep
        self._changes += 1

    async def ping(self, engine: Question, process: Question) -> None:
        """Ask the engine, or while it stands still the process in front of it. Raises what the question raises."""
        changes = self._changes
        if self._under_way or self._asleep:
            await process()
            return
        try:
            await engine()
        except RequestError:
            if changes == self._changes:  # else it began to stand still meanwhile
                raise


async def ask_vllm(client: VllmClient, names: SentNames, *, deadline: float) -> None:
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


async def ask_sglang(server: RemoteServer, names: SentNames, *, deadline: float) -> None:
    """Whether its scheduler answers, takes requests, and has weights of ours."""
    await server.endpoint.get("/server_info", deadline=deadline)
    try:
        await server.endpoint.get("/ready", deadline=deadline)
    except ThrottledError:
        raise TransientError(f"{server.name}: the server is paused, but not by this run") from None
    except PermanentError:  # an older server or a router, which does not know the path
        pass
    names.version((await server.get("/model_info", ModelInfo, deadline=deadline)).weight_version)


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
    return sum(map(float, counts)) if counts else None
