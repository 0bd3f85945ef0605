"""Names problem sets and their settings in messages: by their configuration key, where there is one."""

from __future__ import annotations


def setting(key: str, name: str) -> str:
    """Return what to call the setting `name` of the set at `key`. A file given by itself has no key."""
    return f"{key}.{name}" if key else name


def about(key: str) -> str:
    """Return what a message about the set begins with."""
    return f"{key}: " if key else ""
