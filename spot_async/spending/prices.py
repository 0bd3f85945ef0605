"""What a request takes and what that costs. Pure."""

from __future__ import annotations

import re

import msgspec
from pydantic import Field

from spot_async.config.base import NonNegativeFloat, Section

PER_MILLION = 1e-6
NUMBER = re.compile(rb"\s*:\s*(\d{1,12})\s*[,}]")  # more digits than that count no tokens


class Prices(Section):
    """An endpoint's prices, as its provider states them."""

    prompt: NonNegativeFloat = Field(0.0, description="money per million prompt tokens")
    cached_prompt: NonNegativeFloat | None = Field(
        None, description="the same of those that the endpoint had in its cache; default: as others"
    )
    completion: NonNegativeFloat = Field(0.0, description="money per million generated tokens")
    request: NonNegativeFloat = Field(0.0, description="money per request")
    currency: str = Field("USD", description="what the figures are in; only shown")

    def cost(self, used: Usage) -> float:
        """What one request costs."""
        cached = self.prompt if self.cached_prompt is None else self.cached_prompt
        tokens = (used.prompt_tokens - used.cached_tokens) * self.prompt + used.cached_tokens * cached
        return self.request + PER_MILLION * (tokens + used.completion_tokens * self.completion)

    def highest_cost(self, at_most: Usage) -> float:
        """The most that one request of no more tokens can cost, cached or not."""
        cached = Usage(
            prompt_tokens=at_most.prompt_tokens,
            cached_tokens=at_most.prompt_tokens,
            completion_tokens=at_most.completion_tokens,
        )
        return max(self.cost(at_most), self.cost(cached))


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before it leaves."""

    prompt_tokens: int
    max_completion_tokens: int
    # Where the endpoint tokenises a text itself; default: `prompt_tokens`, which are sent as ids.
    max_prompt_tokens: int | None = None
    logprobs: int = 0  # asked for, of all tokens together: most of a reply's bytes

    @property
    def at_most(self) -> Usage:
        prompt = self.prompt_tokens if self.max_prompt_tokens is None else self.max_prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=self.max_completion_tokens)

    @property
    def counted(self) -> Usage:
        """What counts as used when the reply does not say."""
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.max_completion_tokens)


def read_usage(reply: bytes) -> Usage | None:
    """The tokens that a JSON reply states, as OpenAI's `usage` and SGLang's `meta_info` name them; None without any.

    Replies may be megabytes of log-probabilities, so they are searched, not parsed. Inside a JSON string a quote is
    escaped, and a text that names a log-probability is followed by no whole number: nothing that a model writes is
    taken for a count.
    """
    prompt = _last_number(reply, b'"prompt_tokens"')
    if prompt is None:
        return None
    completion = _last_number(reply, b'"completion_tokens"') or 0
    cached = _last_number(reply, b'"cached_tokens"') or 0
    return Usage(prompt_tokens=prompt, cached_tokens=min(cached, prompt), completion_tokens=completion)


def _last_number(reply: bytes, key: bytes) -> int | None:
    at = reply.rfind(key)
    while at >= 0:
        found = NUMBER.match(reply, at + len(key))
        if found is not None:
            return int(found[1])
        at = reply.rfind(key, 0, at)
    return None
