"""What requests to a remote server may cost: the settings that say so, and the edge where each is charged.

What is charged is decided by who asks (a request that the model works for has a size); what it cost, and when it may
leave, by the account (`spot_async.spending`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Self

import aiohttp
import pydantic
from pydantic import Field

from spot_async.config import PluginSettings, PositiveFloat, PositiveInt
from spot_async.errors import RequestError
from spot_async.spending.account import Account, Charge
from spot_async.spending.prices import Prices, Size
from spot_async.spending.rate_limit import RateLimiter

from .bodies import ANSWER_BYTES, Turn, largest_reply_bytes
from .http import HttpEndpoint

JSON = "application/json"


class MeteredSettings(PluginSettings):
    """Limits and prices of an account, which all servers of a role share."""

    requests_per_minute: PositiveFloat | None = Field(
        None, description="sent at most, by all stages and servers of the role together"
    )
    tokens_per_minute: PositiveFloat | None = Field(
        None,
        description="of prompts and responses together, likewise; a response counts as its limit until it is there",
    )
    prices: Prices | None = Field(
        None, description="what requests cost, for spending.jsonl, the estimate and the budget"
    )
    budget: PositiveFloat | None = Field(
        None, description="money that the run may spend here; it ends cleanly before a request that might cost more"
    )
    token_budget: PositiveInt | None = Field(None, description="the same in tokens, of prompts and responses together")

    @pydantic.model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget is not None and self.prices is None:
            raise ValueError(f"budget={self.budget:g} needs prices: without them nothing is known to cost anything")
        return self

    def open_account(self, role: str) -> Account:
        return Account(
            role,
            prices=self.prices,
            budget=self.budget,
            token_budget=self.token_budget,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class Meter:
    """The way of one server's requests through the account."""

    def __init__(self, role: str, name: str, account: Account) -> None:
        """`name` is the server's, under which the account books."""
        self.role = role
        self.name = name
        self.account = account
        self._own_rate_limit = RateLimiter()  # without limits: only knows when this server asked to wait

    async def post(
        self,
        endpoint: HttpEndpoint,
        path: str,
        body: bytes,
        *,
        deadline: float,
        resend: bool,
        size: Size | None,
        turn: Turn,
    ) -> bytes:
        """The reply's body. A request of a stated `size` is one that the model works for: it waits for its turn, and is
        charged. One that costs money is sent again by nobody but who asked for it, who is charged again."""
        ask = functools.partial(endpoint.post, path, body, content_type=JSON, deadline=deadline, turn=turn)
        if size is None:
            return await ask(resend=resend, largest=ANSWER_BYTES)
        async with self._charged(size, deadline) as charge:
            charge.sent(body)
            largest = largest_reply_bytes(size.counted.tokens, size.logprobs)
            reply = await ask(resend=resend and not self.account.is_metered, largest=largest)
            used = charge.answered(reply)
        endpoint.traffic.prompt_tokens += used.prompt_tokens
        endpoint.traffic.cached_tokens += used.cached_tokens
        endpoint.traffic.completion_tokens += used.completion_tokens
        return reply

    @contextlib.asynccontextmanager
    async def _charged(self, size: Size, deadline: float) -> AsyncIterator[Charge]:
        limit = self.account.rate_limit if self.account.is_limited else self._own_rate_limit
        async with self.account.request(self.name, size, limit, deadline) as charge:
            try:
                yield charge
            except RequestError as error:
                charge.was_sent = not _never_left(error)
                raise


def _never_left(error: BaseException | None) -> bool:
    """Whether there was no connection to send the request over: nobody can have worked for it."""
    while error is not None and not isinstance(error, aiohttp.ClientConnectorError):
        error = error.__cause__ or error.__context__
    return error is not None
