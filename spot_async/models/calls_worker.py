"""A process that reads calls in turns, which a model wrote. Started as a script with its memory in bytes.

It reads the arguments of `read_calls`, `{"template": ..., "text": ..., "tools": ..., "prompt": ...}`, one JSON object
per line, and writes `{"calls": [...]}`, or `{"unreadable": why}`. Whoever waits too long kills it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from spot_async.base.processes.exits import answer_lines
from spot_async.models.calls import read_calls


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"calls": msgspec.to_builtins(read_calls(**request))}
    except ValueError as error:
        return {"unreadable": str(error)}


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    read_calls({"start_anchor": "a", "fields": {"content": {}}}, "", ())  # which imports what is slow to import
    return answer


if __name__ == "__main__":
    answer_lines(load)
