"""Turns rendered prompts back into messages, for endpoints that only chat.

Such an endpoint renders messages with its own template. A message is used only if our template makes exactly the same
prompt from it, token by token. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from spot_async.errors import PermanentError
from spot_async.types import IntArray

from ..shared.replies import only

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

MARK = "\N{OBJECT REPLACEMENT CHARACTER}message\N{OBJECT REPLACEMENT CHARACTER}"
TEMPLATE_ARGUMENTS: tuple[dict[str, bool], ...] = ({"enable_thinking": False}, {"enable_thinking": True}, {})


class ChatMessage(msgspec.Struct):
    content: str | None = None


class ChatChoice(msgspec.Struct):
    message: ChatMessage
    finish_reason: str | None = None


class ChatReply(msgspec.Struct):
    """Reply of /v1/chat/completions."""

    choices: list[ChatChoice]

    @property
    def only(self) -> ChatChoice:
        return only(self.choices)


def user_message(role: str, tokenizer: PreTrainedTokenizerBase, prompt_ids: IntArray) -> str:
    """Return the user message that is rendered as `prompt_ids` (P,). Raises PermanentError if there is none."""
    text = tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
    for arguments in TEMPLATE_ARGUMENTS if tokenizer.chat_template else ():
        for message in _candidates(tokenizer, text, arguments):
            if np.array_equal(_rendered(tokenizer, message, arguments, tokenize=True), prompt_ids):
                return message
    raise PermanentError(
        f"{role}.backend only chats, and this prompt is no chat of one user message in {role}.model's template"
    )


def _candidates(tokenizer: PreTrainedTokenizerBase, text: str, arguments: dict[str, bool]) -> Iterator[str]:
    """Yield possible messages: the text between the beginning and the end that the template writes."""
    before, mark, after = _rendered(tokenizer, MARK, arguments, tokenize=False).partition(MARK)
    if mark and text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
        yield text[len(before) : len(text) - len(after)]


def _rendered(tokenizer: PreTrainedTokenizerBase, message: str, arguments: dict[str, bool], *, tokenize: bool) -> Any:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}],
        add_generation_prompt=True,
        tokenize=tokenize,
        **({"return_dict": True} if tokenize else {}),
        **arguments,
    )
    return rendered["input_ids"] if tokenize else rendered
