"""What messages call a problem set and its settings: by their key of the configuration, where there is one."""

from __future__ import annotations


def setting(key: str, name: str) -> str:
    """The setting `name` of the set that `key` describes; without a `key`, of a file given by itself."""
    return f"{key}.{name}" if key else name


def about(key: str) -> str:
    """What a message about the set begins with."""
    return f"{key}: " if key else ""
