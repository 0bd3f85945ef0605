"""How many tokens a request takes, and what they cost. Pure."""

from __future__ import annotations

import re

import msgspec
from pydantic import Field

from spot_async.config.base import NonNegativeFloat, Section

PER_MILLION = 1e-6
NUMBER = re.compile(rb"\s*:\s*(\d{1,12})\s*[,}]")  # a number with more digits is no token count


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
        """Return what one request costs that took these tokens."""
        cached = self.prompt if self.cached_prompt is None else self.cached_prompt
        tokens = (used.prompt_tokens - used.cached_tokens) * self.prompt + used.cached_tokens * cached
        return self.request + PER_MILLION * (tokens + used.completion_tokens * self.completion)

    def highest_cost(self, at_most: Usage) -> float:
        """Return the most that a request of at most these tokens can cost.

        Its prompt may be cached or not, and either may be the dearer one.
        """
        cached = Usage(
            prompt_tokens=at_most.prompt_tokens,
            cached_tokens=at_most.prompt_tokens,
            completion_tokens=at_most.completion_tokens,
        )
        return max(self.cost(at_most), self.cost(cached))


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one request."""

    prompt_tokens: int
    cached_tokens: int = 0  # those of `prompt_tokens` that the endpoint had cached
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before it leaves."""

    prompt_tokens: int
    max_completion_tokens: int
    # For a prompt sent as text, which the endpoint tokenises itself. None: it is sent as ids, so the number is known.
    max_prompt_tokens: int | None = None
    logprobs: int = 0  # how many are asked for, over all tokens: they are most of a reply's bytes

    @property
    def at_most(self) -> Usage:
        prompt = self.prompt_tokens if self.max_prompt_tokens is None else self.max_prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=self.max_completion_tokens)

    @property
    def counted(self) -> Usage:
        """The tokens that are booked when the reply does not state them."""
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.max_completion_tokens)


def read_usage(reply: bytes) -> Usage | None:
    """Return the tokens that a JSON reply states in OpenAI's `usage` or SGLang's `meta_info`; None if it states none.

    The reply is searched, not parsed, since it may be megabytes of log-probabilities. Text that a model wrote cannot be
    taken for a count: JSON escapes the quotes inside a string, so the quoted key never occurs in one. Where a token is
    itself a key of log-probabilities, no whole number follows it.
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
