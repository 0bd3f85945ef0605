"""Checks whether an SGLang server is alive. Which routes can be trusted was measured with 0.5.23.

/ready, /model_info and /v1/loads answer even if the engine is frozen. /server_info asks the engine's scheduler. /health
generates a token, takes a second, and fails while the server is paused.
"""

from __future__ import annotations

from spot_async.errors import PermanentError, ThrottledError, TransientError

from ..shared.held_weights import ReplyNames
from ..shared.remote import RemoteServer
from .weights import ModelInfo


async def ask_engine(server: RemoteServer, names: ReplyNames, *, deadline: float) -> None:
    """Raise a `RequestError` unless the scheduler answers, accepts requests, and has weights that we sent."""
    await server.endpoint.get("/server_info", deadline=deadline)
    try:
        await server.endpoint.get("/ready", deadline=deadline)
    except ThrottledError:
        raise TransientError(f"{server.name}: the server is paused, but not by this run") from None
    except PermanentError:  # an older server or a router, without this path
        pass
    names.version((await server.get("/model_info", ModelInfo, deadline=deadline)).weight_version)
