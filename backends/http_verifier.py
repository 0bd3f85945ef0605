"""The verifier behind a url: a reward model, a model that judges, tests that run code, whatever answers a question.

It asks one question for each response, and reads a small JSON reply. Who answers decides what is right; here it is only
decided whether the reply is a judgement. As of a teacher's server, failures are the stage's to see to: it sends a
question again, waits where it is asked to, and gives up at its deadline. A reply that is no judgement becomes missing
evidence, and never a reward.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from contextvars import Token
from typing import Any, ClassVar

import httpx
import msgspec
import pydantic
from pydantic import Field

from spot_async.base.retry import QUESTION_TIMEOUT_S
from spot_async.base.tasks import Opened
from spot_async.spending.account import Account
from spot_async.spending.prices import Size
from spot_async.spending.rate_limit import LEASED, Grant, RateLimiter
from spot_async.types import Judgement, Problem, Verdict

from .shared.connection import Address, proxy_for
from .shared.http import HttpEndpoint, Route
from .shared.remote import JSON, when_free
from .shared.settings import EndpointSettings

SECTION = "verifier"
MAX_REPLY_BYTES = 1 << 16  # of a judgement, feedback and all
ASKED_FIRST = Problem(id="spot-async", text="What is 1 + 1?", answer="2"), r"\boxed{2}"
NO_TOKENS = Size(prompt_tokens=0, max_completion_tokens=0)  # a question is counted, and its tokens are not


class Question(msgspec.Struct):
    """What is sent. Everything but the response is as the problem file has it."""

    id: str
    problem: str  # with the messages before it, where there are some
    answer: str  # empty where the problem has none
    response: str
    solution: str | None
    choices: tuple[str, ...]
    tier: str | None
    category: str | None


class Reply(msgspec.Struct, forbid_unknown_fields=True):
    """What comes back. With a `score` that is not read, a verdict's own reward would be learned from."""

    verdict: Verdict | None = None
    reward: float | None = None
    feedback: str | None = None


class HttpVerifier(Opened):
    """Judges by asking a server. It is a pool of itself, in which requests wait for their turn before their time runs.

    Each request has a connection of its own: one that serves several could give a late reply to the next question.
    """

    class Settings(EndpointSettings):
        JUDGES_ANSWERS: ClassVar[bool] = False
        WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
            {"api_key_env", "secret_headers", "proxy", "ca_certificates", "requests_per_minute", "prices", "budget"}
        )

        kind: str = "http"
        url: Address = Field(description="where questions are posted to, such as http://127.0.0.1:9000/judge")

        @pydantic.field_validator("prices")
        @classmethod
        def _by_request(cls, prices: Any) -> Any:
            if prices is not None and (prices.prompt or prices.completion or prices.cached_prompt):
                raise ValueError("what a verifier's tokens cost is not known before: give only prices.request")
            return prices

        def open_account(self, role: str) -> Account:
            return Account(
                role,
                prices=self.prices,
                budget=self.budget,
                requests_per_minute=self.requests_per_minute,
                section=SECTION,
            )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        url = httpx.URL(settings.url)
        base, self._path = f"{url.scheme}://{url.netloc.decode()}", url.raw_path.decode()
        self._account = settings.account or settings.open_account(SECTION)
        self._endpoint: HttpEndpoint = settings.endpoint(
            SECTION,
            SECTION,
            base,
            route=Route(proxy=proxy_for(SECTION, base, settings.proxy), keeps_open=False),
            api_key=settings.api_key(SECTION),
        )

    async def _open(self, stack: AsyncExitStack) -> None:
        """Connect, and ask about a sum, so that a server that gives no judgements is known before a run begins."""
        deadline = asyncio.get_running_loop().time() + QUESTION_TIMEOUT_S
        await stack.enter_async_context(self._endpoint)
        await when_free(lambda: self.verify(*ASKED_FIRST, deadline=deadline), deadline)

    async def lease(self, request: object) -> Lease:
        """Wait until the account's limits let another request leave: that is no part of its time."""
        limit, loop = self._account.rate_limit, asyncio.get_running_loop()
        while True:
            if (delay_s := limit.delay_s(loop.time(), tokens=0)) <= 0:
                return Lease(self, limit)
            await asyncio.sleep(delay_s)

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Judgement:
        """Ask once. Raises a `RequestError`: `PoisonedReplyError` for a reply that is no judgement."""
        question = Question(
            id=problem.id,
            problem=problem.shown,
            answer=problem.answer,
            response=response_text,
            solution=problem.solution,
            choices=problem.choices,
            tier=problem.tier,
            category=problem.category,
        )
        body = msgspec.json.encode(question)
        account, endpoint = self._account, self._endpoint
        async with account.request(SECTION, NO_TOKENS, account.rate_limit, deadline) as charge:
            charge.sent(body)
            reply = await endpoint.post(
                self._path,
                body,
                content_type=JSON,
                deadline=deadline,
                resend=False,
                largest=MAX_REPLY_BYTES,
            )
            charge.answered(reply)
            charge.stated = NO_TOKENS.counted  # else an answer without a `usage` would count as not stated
        with endpoint.reading("POST", self._path, body, reply):
            return read_judgement(reply)


class Lease:
    """The right to send one request now: a `replicas.leasing.Lease`."""

    replica = ""

    def __init__(self, verifier: HttpVerifier, limit: RateLimiter) -> None:
        self._verifier = verifier
        self._limit = limit
        self._grant = limit.grant(tokens=0)
        self._before: Token[Grant | None]

    def give_back(self) -> None:
        self._limit.give_back(self._grant)

    async def __aenter__(self) -> HttpVerifier:
        self._before = LEASED.set(self._grant)
        return self._verifier

    async def __aexit__(self, *exc_info: object) -> None:
        LEASED.reset(self._before)
        self.give_back()


def read_judgement(reply: bytes) -> Judgement:
    """Return the judgement in a reply. Raises ValueError, TypeError or a msgspec error if it has none.

    A reward alone says neither right nor wrong.
    """
    said = msgspec.json.decode(reply, type=Reply)
    if said.verdict is None and said.reward is None:
        raise ValueError("it has neither a verdict nor a reward")
    return Judgement(said.verdict or Verdict.UNJUDGED, said.reward, said.feedback or "")
