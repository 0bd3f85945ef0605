"""Whether an SGLang server lives. What can be trusted was measured (0.5.23).

/ready, /model_info and /v1/loads answer although the engine is frozen; /server_info asks its scheduler. /health
generates a token, takes a second, and fails while the server is paused.
"""

from __future__ import annotations

from spot_async.errors import PermanentError, ThrottledError, TransientError

from ..shared.held_weights import SentNames
from ..shared.remote import RemoteServer
from .weights import ModelInfo


async def ask_engine(server: RemoteServer, names: SentNames, *, deadline: float) -> None:
    """Whether its scheduler answers, takes requests, and has weights of ours."""
    await server.endpoint.get("/server_info", deadline=deadline)
    try:
        await server.endpoint.get("/ready", deadline=deadline)
    except ThrottledError:
        raise TransientError(f"{server.name}: the server is paused, but not by this run") from None
    except PermanentError:  # an older server or a router, which does not know the path
        pass
    names.version((await server.get("/model_info", ModelInfo, deadline=deadline)).weight_version)
