"""Estimates the size of a request to an OpenAI-compatible endpoint before it is sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spot_async.spending.prices import Size

LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
LOGPROB_KEYS = ("prompt_logprobs", "logprobs", "top_logprobs")
TEMPLATE_TOKENS = 256  # more than a chat template or a provider's own system message adds


def request_size(body: Mapping[str, Any], prompt_tokens: int) -> Size:
    """Return the size of a completion or chat request. `prompt_tokens` is counted by our own tokenizer.

    The endpoint tokenises a text itself. It cannot make more tokens than bytes, and adds a template and start tokens.
    """
    longest = max([body.get(key) or 0 for key in LENGTH_KEYS])
    prompt = body.get("prompt")
    if prompt is None:
        prompt = "".join(str(each.get("content", "")) for each in body["messages"])
    at_most = len(prompt.encode()) + TEMPLATE_TOKENS if isinstance(prompt, str) else None
    longest = max(1, longest)  # some endpoints generate a token even if none is asked for, and count it
    per_token = 1 + max([int(body.get(key) or 0) for key in LOGPROB_KEYS])  # the token's own comes along
    return Size(
        prompt_tokens=prompt_tokens,
        max_completion_tokens=longest,
        max_prompt_tokens=at_most,
        logprobs=per_token * (prompt_tokens + TEMPLATE_TOKENS + longest),
    )
