"""Checks an SGLang server before it is asked anything else: it must be ready, and serve the directory's model.

Raises `ConfigError` if it does not. It sends only requests that every version survives.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from spot_async.errors import ConfigError, PermanentError, ThrottledError

from ..shared.discovery import PROCESS, Saying, asked_as, may_be_other, release
from ..shared.remote import RemoteServer
from .weights import GENERATE, ServerInfo

SERVER_INFO = "/server_info"
# What only one server says. Its seed is drawn when it starts, unless --random-seed names one.
SAYINGS = {
    PROCESS: Saying(SERVER_INFO, re.compile(rb'"random_seed":\s*(\d+)')),
    "version": Saying(SERVER_INFO, re.compile(rb'"version":\s*"([^"]*)"')),
    "weights": Saying("/model_info", re.compile(rb'"weight_version":\s*"([^"]*)"')),
}
CHOSEN_IDS_CHECKED = (0, 5, 14)  # from here on; before, a chosen id outside the vocabulary crashed the server
PLAIN_TEXT = "The sum of two and three is five, and the product of two and three is six."


async def server_info(server: RemoteServer, *, deadline: float) -> ServerInfo:
    """Return what the server says about itself. Raises `ConfigError` for a server of another kind."""
    async with asked_as(server, "SGLang", may_be_other, deadline=deadline):
        return await server.get(SERVER_INFO, ServerInfo, deadline=deadline)


async def check_ready(server: RemoteServer, *, deadline: float) -> None:
    """Raise `ConfigError` if the server is paused, since it would accept requests and answer none."""
    try:
        await server.endpoint.get("/ready", deadline=deadline)
    except ThrottledError:
        raise ConfigError(
            f"{server.section}: the server is paused, or still starting (GET /ready is 503): where an earlier run "
            "left it paused, POST /continue_generation; a student gets this run's weights before it is used"
        ) from None
    except PermanentError:  # an older server or a router, without this path
        return


async def check_vocabulary(
    server: RemoteServer, info: ServerInfo, neutral: Mapping[str, Any], *, deadline: float
) -> None:
    """Raise `ConfigError` unless the server accepts the directory's last token id and refuses the next.

    `neutral` are the sampling parameters of every request.
    """
    if release(info.version) < CHOSEN_IDS_CHECKED:
        return
    vocab_size = server.files.vocab_size
    for token_id, is_taken in ((vocab_size - 1, True), (vocab_size, False)):
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": [0],
            "sampling_params": {**neutral, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": [token_id],
        }
        try:
            await server.ask(GENERATE, body, bytes, deadline=deadline)
            was_taken = True
        except PermanentError as error:
            if "out-of-vocabulary" not in str(error):
                raise
            was_taken = False
        if was_taken != is_taken:
            raise ConfigError(
                f"{server.role}.model: its config.json says vocab_size={vocab_size}, but the server "
                f"{'takes' if was_taken else 'refuses'} token {token_id}: give the served model's directory"
            )


def check_exact(server: RemoteServer, info: ServerInfo) -> None:
    """Raise `ConfigError` for a student whose server takes more of a draft's tokens than the student would sample."""
    thresholds = {
        "--speculative-accept-threshold-single": info.speculative_accept_threshold_single,
        "--speculative-accept-threshold-acc": info.speculative_accept_threshold_acc,
    }
    low = [f"{flag} {value:g}" for flag, value in thresholds.items() if value < 1]
    if server.role == "student" and info.speculative_algorithm is not None and low:
        raise ConfigError(
            f"{server.section}: the server was started with {' '.join(low)}, so it samples tokens that the student "
            "would not: start it without"
        )


def check_cache(server: RemoteServer, info: ServerInfo) -> None:
    """Raise `ConfigError` for a server that found less room than its cache was to have. It only warns of that."""
    asked, found = info.max_total_tokens, info.max_total_num_tokens
    if asked is not None and found is not None and found <= asked - (info.page_size or 1):
        raise ConfigError(
            f"{server.section}: the server was to have a cache of {asked} tokens, and its devices had room for "
            f"{found}: end what else uses them, or lower launch.memory_fraction"
        )
