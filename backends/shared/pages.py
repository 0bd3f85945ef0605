"""Reads the text of HTML pages, with which proxies and gateways answer in place of JSON. Pure."""

from __future__ import annotations

import html
import re

TAG = re.compile(r"<([^<>]*)>")
BEGINNINGS = ("<html", "<!doctype", "<head", "<body", "<?xml", "<h1", "<!--")
NOT_SHOWN = ("script", "style")
LARGEST_PAGE_CHARACTERS = 1 << 14  # only a page's beginning is read, which says what it is about


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
