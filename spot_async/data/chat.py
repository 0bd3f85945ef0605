"""Reads chat messages in OpenAI's form: the question, the turns before it, and the assistant's last answer.

The question is the last message of a user. Messages before it are the history, messages after it are the answer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from spot_async.types import ChatTurn

Messages: TypeAlias = list[dict[str, Any]]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # as templates know them


def is_chat(value: object) -> bool:
    """Return whether a column holds chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def asked(messages: Messages) -> tuple[str, tuple[ChatTurn, ...]]:
    """Return the user's last message and all turns before it.

    Raises ValueError if no template could render them. The message continues a sentence that begins with the column's
    name.
    """
    last = max((index for index, each in enumerate(messages) if each["role"] == "user"), default=None)
    if last is None:
        raise ValueError("has no message of a user")
    turns = [_turn(number, each) for number, each in enumerate(messages[: last + 1], start=1)]
    return turns[-1].content, tuple(turns[:-1])


def last_of_assistant(messages: Messages) -> str:
    """Return the text of the assistant's last message; empty where there is none."""
    said = [each.get("content") for each in messages if each["role"] == "assistant"]
    return (_text(said[-1]) or "") if said else ""


def _turn(number: int, message: dict[str, Any]) -> ChatTurn:
    role, text = _ROLES.get(str(message["role"])), _text(message.get("content"))
    if role is None:
        raise ValueError(f"has message {number} of another role than system, user or assistant")
    if text is None:
        raise ValueError(f"has message {number} with a content that is not text")
    return ChatTurn(role=role, content=text)


def _text(content: object) -> str | None:
    """Return the text of a message, which may be a list of parts; None if it holds anything but text."""
    if isinstance(content, list):
        texts = [each.get("text") for each in content if isinstance(each, dict) and each.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    return content if isinstance(content, str) else None
