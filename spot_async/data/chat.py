"""Chat messages as OpenAI has them: which of them ask, and what the assistant said last.

The last message of a user asks; those before it are what was said until then, and those behind it the answer to it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from spot_async.types import ChatTurn

Messages: TypeAlias = list[dict[str, Any]]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # as templates know them


def is_chat(value: object) -> bool:
    """Whether a column holds chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def asked(messages: Messages) -> tuple[str, tuple[ChatTurn, ...]]:
    """What a user says last, and all that was said before it.

    Raises ValueError, in words that follow the name of the column, where no template could render it.
    """
    last = max((index for index, each in enumerate(messages) if each["role"] == "user"), default=None)
    if last is None:
        raise ValueError("has no message of a user")
    turns = [_turn(number, each) for number, each in enumerate(messages[: last + 1], start=1)]
    return turns[-1].content, tuple(turns[:-1])


def last_of_assistant(messages: Messages) -> str:
    """The text of the assistant's last message; empty where there is none."""
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
    """The text of a message, which may be a list of parts; None where it holds anything else."""
    if isinstance(content, list):
        texts = [each.get("text") for each in content if isinstance(each, dict) and each.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    return content if isinstance(content, str) else None
