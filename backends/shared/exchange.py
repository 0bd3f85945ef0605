"""Shortens bodies of requests and replies for people who read about a failure. It keeps their structure. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from .failures import UNREADABLE

EXCERPT_CHARACTERS = 500
SHOWN_ITEMS = 8  # of a list, since nobody reads thousands of token ids
SHOWN_KEYS = 40
SHOWN_CHARACTERS = 300  # of a text
DEEPEST = 6


def excerpt(body: bytes) -> str:
    """Return the beginning of a body. Bytes that are not text are escaped."""
    return body[: 4 * EXCERPT_CHARACTERS].decode(errors="backslashreplace")[:EXCERPT_CHARACTERS]


def shortened(body: bytes) -> Any:
    """Return the body of a request, JSON or msgpack, as plain values with long parts cut."""
    if not body:
        return None
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            return _shortened(decode(body), DEEPEST)
        except UNREADABLE:
            continue
    return excerpt(body)


def _shortened(value: Any, depth: int) -> Any:
    match value:
        case dict() | list() if depth == 0:
            return "..."
        case dict():
            shown = {str(key): _shortened(each, depth - 1) for key, each in list(value.items())[:SHOWN_KEYS]}
            return shown | ({"...": len(value)} if len(value) > SHOWN_KEYS else {})
        case list():
            items = [_shortened(each, depth - 1) for each in value[:SHOWN_ITEMS]]
            return [*items, f"... {len(value)} in all"] if len(value) > SHOWN_ITEMS else items
        case str():
            return value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}... {len(value)} in all"
        case bytes():
            return f"{len(value)} bytes"
        case _:
            return value
