"""Says what answers at an address where another kind of server was expected, and which `kind` is right for it."""

from __future__ import annotations

import msgspec

from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError

from .http import HttpEndpoint

MODELS = "/v1/models"
NO_ROUTE = (404, 405)
OWNERS = {"vllm": ("vLLM", "vllm"), "sglang": ("SGLang", "sglang"), "spot-async": ("`spot-async serve`", "local")}


class _Model(msgspec.Struct):
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


def may_be_other(error: RequestError) -> bool:
    """Return whether a request failed as it does at a server that does not know it."""
    if isinstance(error, PermanentError):
        return error.exchange is not None and error.exchange.status in NO_ROUTE
    return isinstance(error, PoisonedReplyError)


async def other_kind(
    endpoint: HttpEndpoint, section: str, error: RequestError, *, expected: str, others: str, deadline: float
) -> ConfigError:
    """Return the refusal of a server that failed with `error`, and is none of the `expected` name.

    It asks for the list of models, in which each server names itself. `others` are the kinds to choose from where that
    tells nothing.
    """
    exchange = error.exchange
    asked = "" if exchange is None else f" ({exchange.method} {exchange.path})"
    line = f"{section}: {endpoint.name} does not answer as {expected} does{asked}"
    try:
        models = msgspec.json.decode(await endpoint.get(MODELS, deadline=deadline), type=_Models).data
    except (RequestError, msgspec.MsgspecError):
        return ConfigError(f"{line}; for another server use kind: {others}{endpoint.through}")
    name, kind = next((OWNERS[each.owned_by] for each in models if each.owned_by in OWNERS), ("", "openai"))
    if name == expected:
        return ConfigError(f"{line}, though it says that it is: update it, or give its own url, not a router's")
    return ConfigError(f"{line}, but as {name or 'an OpenAI-compatible server'}: use kind: {kind}")
