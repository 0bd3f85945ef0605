"""What is kept of a prompt that was given up: one line of `dead_letters.jsonl`, enough to see why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from spot_async.base.text import counted
from spot_async.errors import RequestError
from spot_async.types import Prompt

FILE_NAME = "dead_letters.jsonl"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the reason may be missing: not every failure got as far as a request."""

    ordinal: int = -1
    problem_id: str = ""
    stage: str | None = None
    failure: str = ""  # class: permanent, throttled, transient or poisoned
    error: str = ""  # its name in `errors.py`
    reason: str = ""
    attempts: int = 1  # sendings of the request
    endpoint: str | None = None
    request: dict[str, Any] | None = None  # method, path, bytes and body; long lists and texts cut
    reply: dict[str, Any] | None = None  # status and head of the body


def dead_letter(prompt: Prompt, error: RequestError) -> DeadLetter:
    """The record of a prompt whose request failed for good."""
    exchange = error.exchange
    letter = DeadLetter(
        ordinal=prompt.ordinal,
        problem_id=prompt.problem.id,
        stage=error.stage,
        failure=error.failure_class,
        error=type(error).__name__,
        reason=str(error),
        attempts=error.attempts,
    )
    if exchange is None:
        return letter
    return msgspec.structs.replace(
        letter,
        endpoint=exchange.endpoint,
        request={
            "method": exchange.method,
            "path": exchange.path,
            "bytes": exchange.sent_bytes,
            "body": exchange.sent,
        },
        reply=None if exchange.status is None else {"status": exchange.status, "head": exchange.received},
    )


def described(letters: Sequence[DeadLetter]) -> str:
    """How many prompts were given up, over what, and where to read on: one line."""
    kinds = Counter(f"{each.failure} failures at {each.stage}" if each.stage else each.failure for each in letters)
    said = ", ".join(f"{count} over {kind}" for kind, count in kinds.most_common() if kind)
    return f"{counted(len(letters), 'prompt')} given up{f' ({said})' if said else ''}: {FILE_NAME}"
