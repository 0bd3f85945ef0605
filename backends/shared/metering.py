"""Charges requests to a remote server to its role's account, and has the settings of that account.

The caller decides which requests are charged: those that the model works for have a size. The account decides when a
request may leave, and what it cost (`spot_async.spending`).
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
    """The settings of an account, with its limits and prices. All servers of a role share the account."""

    requests_per_minute: PositiveFloat | None = Field(
        None, description="most requests that all stages and servers of the role may send together"
    )
    tokens_per_minute: PositiveFloat | None = Field(
        None,
        description="the same in tokens, of prompts and responses; until it is there, a response counts as its limit",
    )
    prices: Prices | None = Field(
        None, description="what requests cost, for spending.jsonl, the estimate and the budget"
    )
    budget: PositiveFloat | None = Field(
        None, description="money that the run may spend here; it ends cleanly before a request that might cost more"
    )
    token_budget: PositiveInt | None = Field(None, description="the same in tokens, of prompts and responses")

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
    """Sends one server's requests, and charges them to the account."""

    def __init__(self, role: str, name: str, account: Account) -> None:
        """`name` is the server's. The account keeps its sums apart by this name."""
        self.role = role
        self.name = name
        self.account = account
        self._own_rate_limit = RateLimiter()  # has no limits of its own, only the pauses that this server asked for

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
        """Send a request and return the reply's body.

        A request with a `size` is one that the model works for. It waits for its turn and is charged. If it costs
        money, it is not sent again here: whoever asked for it may send it again, and is charged again.
        """
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
    """Return whether there was no connection to send the request over, so that no model can have worked for it."""
    while error is not None and not isinstance(error, aiohttp.ClientConnectorError):
        error = error.__cause__ or error.__context__
    return error is not None
