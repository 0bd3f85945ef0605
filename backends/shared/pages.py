"""What a page for people says: proxies and gateways answer with pages where their servers answer with JSON. Pure."""

from __future__ import annotations

import html
import re

TAG = re.compile(r"<([^<>]*)>")
BEGINNINGS = ("<html", "<!doctype", "<head", "<body", "<?xml", "<h1", "<!--")
NOT_SHOWN = ("script", "style")
LARGEST_PAGE_CHARACTERS = 1 << 14  # what a page is about stands at its beginning


def is_page(text: str) -> bool:
    """Whether a text that begins like this is one."""
    return text.lstrip("\ufeff \t\r\n").lower().startswith(BEGINNINGS)


def page_text(page: str) -> str:
    """The text without its tags; what stands there twice, as a title and a heading do, once."""
    shown: dict[str, None] = {}
    hidden = ""
    for number, part in enumerate(TAG.split(page[:LARGEST_PAGE_CHARACTERS])):
        if number % 2:  # a tag
            name = part.split(maxsplit=1)[0].lower() if part.strip() else ""
            hidden = name if not hidden and name in NOT_SHOWN else "" if name == f"/{hidden}" else hidden
        elif not hidden:
            shown[" ".join(html.unescape(part).split())] = None
    return " ".join(line for line in shown if line)
