"""What every backend finds out about a server at its start: its noise, which kind it is of, how many answer there.

To count servers, each request has a connection of its own, since balancers choose a server for a connection or for a
request. Backends say which reply identifies one server. Equal answers prove nothing, so a count is a lower bound.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import structlog

from spot_async.base.tasks import gather
from spot_async.errors import ConfigError, FailureClass, PermanentError, PoisonedReplyError, RequestError
from spot_async.models import precision
from spot_async.types import BehindUrl, FloatArray, Generation, IntArray, LogprobTemperature

from .http import HttpEndpoint
from .remote import RemoteServer, Server, when_free

LEAST_NOISE_NATS = 1e-6  # float32's rounding of log-probabilities, since rows that were equal once may differ later
MODELS = "/v1/models"
NO_ROUTE = (404, 405)
OWNERS = {"vllm": ("vLLM", "vllm"), "sglang": ("SGLang", "sglang"), "spot-async": ("`spot-async serve`", "local")}
CONNECTIONS = 8  # two servers behind a balancer that chooses at random look like one once in 128 times
OWN_CONNECTION = {"Connection": "close"}
IsOther: TypeAlias = Callable[[RequestError], bool]
PROCESS = "process"  # which process answers; what else is asked may differ between servers, and should not


def noise_nats(differences: Iterable[FloatArray]) -> float:
    """Return the noise to expect, from differences (nats, any shapes) between replies about the same rows."""
    return max(LEAST_NOISE_NATS, precision.noise_nats(np.concatenate([each.ravel() for each in differences])))


def differences(
    generated: Generation, logprobs: FloatArray, topk_ids: IntArray, topk_logprobs: FloatArray
) -> Iterator[FloatArray]:
    """Yield differences between rows as generated, and as scored later: `logprobs` (T,) and a top-K (T, K)."""
    yield generated.logprobs - logprobs
    if generated.topk_ids is not None and generated.topk_logprobs is not None:
        same = generated.topk_ids == topk_ids
        yield (generated.topk_logprobs - topk_logprobs)[same]


def temperature_convention(at_one: FloatArray, at_half: FloatArray) -> LogprobTemperature:
    """Return "request" if a row's top-K (K,) has doubled differences at temperature 1/2, else "one"."""
    return "one" if np.ptp(at_half) < 1.5 * np.ptp(at_one) else "request"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a server's version. A version without any counts as the newest."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (1 << 30,)


class Tokenized(msgspec.Struct):
    tokens: list[int]


async def compare_tokenizers(
    server: RemoteServer, texts: Iterable[str], *, deadline: float, may_refuse: bool = False, **fields: str
) -> None:
    """Raise `ConfigError` unless ids mean the same on both sides, because requests contain only ids.

    Where nothing is at the path, as behind a router, there is a warning. `may_refuse`: also for any other refusal.
    """
    for text in texts:
        body = {**fields, "prompt": text, "add_special_tokens": False}
        try:
            theirs = await server.post("/tokenize", body, Tokenized, deadline=deadline)
        except PermanentError as error:
            if not (may_refuse or is_unknown(error)):
                raise
            structlog.get_logger().warning("tokenizers not compared", role=server.role, missing="/tokenize")
            return
        if theirs.tokens != server.files.vocabulary.tokenizer.encode(text, add_special_tokens=False):
            raise ConfigError(
                f"{server.role}.model: the tokenizers of {server.files.directory} and of the served model differ: they "
                f"read {text!r} as different tokens; give the directory of the model that is served"
            )


class ListedModel(msgspec.Struct):
    """What servers say of a model in /v1/models."""

    id: str = ""
    root: str | None = None  # vLLM's: its directory
    owned_by: str = ""
    max_model_len: int | None = None  # of vLLM and SGLang


class ModelList(msgspec.Struct):
    """The reply of /v1/models."""

    data: list[ListedModel]


def is_unknown(error: RequestError) -> bool:
    """Return whether a server has nothing at the request's path."""
    return isinstance(error, PermanentError) and error.exchange is not None and error.exchange.status in NO_ROUTE


def may_be_other(error: RequestError) -> bool:
    """Return whether a request failed as it does at a server that does not know it."""
    return is_unknown(error) or isinstance(error, PoisonedReplyError)


@asynccontextmanager
async def asked_as(server: Server, expected: str, is_other: IsOther, *, deadline: float) -> AsyncIterator[None]:
    """Raise as ConfigError what a server refuses inside that `is_other`, none of the `expected` name.

    It is asked for the list of models, in which each server names itself.
    """
    try:
        yield
    except (PermanentError, PoisonedReplyError) as error:
        if not is_other(error):
            raise
        raise await _other_kind(server, error, expected, deadline) from None


async def _other_kind(server: Server, error: RequestError, expected: str, deadline: float) -> ConfigError:
    exchange, endpoint = error.exchange, server.endpoint
    asked = "" if exchange is None else f" ({exchange.method} {exchange.path})"
    line = f"{server.section}: {endpoint.name} does not answer as {expected} does{asked}"
    try:
        models = msgspec.json.decode(await endpoint.get(MODELS, deadline=deadline), type=ModelList).data
    except (RequestError, msgspec.MsgspecError):
        others = ", ".join(kind for name, kind in OWNERS.values() if name != expected and kind != "local")
        return ConfigError(f"{line}; for another server use kind: {others} or openai{endpoint.through}")
    name, kind = next((OWNERS[each.owned_by] for each in models if each.owned_by in OWNERS), ("", "openai"))
    if name == expected:
        return ConfigError(f"{line}, though it says that it is: update it, or give its own url, not a router's")
    return ConfigError(f"{line}, but as {name or 'an OpenAI-compatible server'}: use kind: {kind}")


@dataclass(frozen=True)
class Saying:
    """Where a server says something of itself."""

    path: str
    pattern: re.Pattern[bytes]  # what it says is the first group


async def ask_behind(server: RemoteServer, sayings: Mapping[str, Saying], *, deadline: float) -> BehindUrl | None:
    """Return what answered at an attached server's address; None for a server that we started."""
    if not server.settings.is_attached:
        return None
    said = {}
    async with server.connection(OWN_CONNECTION) as endpoint:
        for what, saying in sayings.items():  # not at once: each adds to the load of a server at work
            answers = await gather(_answer(endpoint, saying, deadline) for _ in range(CONNECTIONS))
            said[what] = [answer for answer in answers if answer is not None]
    return behind(said)


def behind(said: Mapping[str, Sequence[str]]) -> BehindUrl:
    """Conclude from what was `said` over several connections."""
    different = {what: len({*answers}) for what, answers in said.items()}
    most = max(different.values(), default=0)
    return BehindUrl(
        servers=most if different.get(PROCESS) or most > 1 else None,
        differing=tuple(what for what, count in different.items() if count > 1),
    )


async def _answer(endpoint: HttpEndpoint, saying: Saying, deadline: float) -> str | None:
    try:
        said = await when_free(lambda: endpoint.get(saying.path, deadline=deadline), deadline)
    except RequestError as error:  # no such route, most often
        if error.failure_class is FailureClass.THROTTLED:
            raise
        return None
    found = saying.pattern.search(said)
    return found and found[1].decode(errors="replace")
