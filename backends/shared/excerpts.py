"""Shortens what people read about a failure: bodies of requests and replies, and the HTML pages of proxies. Pure."""

from __future__ import annotations

import html
import re
from typing import Any

import msgspec

EXCERPT_CHARACTERS = 500
SHOWN_ITEMS = 8  # of a list, since nobody reads thousands of token ids
SHOWN_KEYS = 40
SHOWN_CHARACTERS = 300  # of a text
DEEPEST = 6
TAG = re.compile(r"<([^<>]*)>")
BEGINNINGS = ("<html", "<!doctype", "<head", "<body", "<?xml", "<h1", "<!--")
NOT_SHOWN = ("script", "style")
LARGEST_PAGE_CHARACTERS = 1 << 14  # only a page's beginning is read, which says what it is about
# What reading a damaged reply can raise, besides our own errors.
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, EOFError)


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


def is_page(text: str) -> bool:
    """Return whether a text that begins like this is an HTML page."""
    return text.lstrip("\ufeff \t\r\n").lower().startswith(BEGINNINGS)


def page_text(page: str) -> str:
    """Return the page's text without tags. Text that occurs twice, like title and heading, is kept once."""
    shown: dict[str, None] = {}
    hidden = ""
    for number, part in enumerate(TAG.split(page[:LARGEST_PAGE_CHARACTERS])):
        if number % 2:  # every second part is a tag
            name = part.split(maxsplit=1)[0].lower() if part.strip() else ""
            hidden = name if not hidden and name in NOT_SHOWN else "" if name == f"/{hidden}" else hidden
        elif not hidden:
            shown[" ".join(html.unescape(part).split())] = None
    return " ".join(line for line in shown if line)
