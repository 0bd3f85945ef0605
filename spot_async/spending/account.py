"""One role's account with the endpoints that serve it: what may be sent, what was sent, and what that cost.

Every request that can be billed leaves through `Account.request`, whoever sends it (stages, retries, checks at the
start). It waits for its turn under the rate limits, and its worst case is reserved from the budget before it leaves.
What the reply states then replaces the worst case. A request that was sent and never answered may have been billed all
the same, so its worst case stays counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import KW_ONLY, dataclass

import msgspec

from spot_async.errors import BudgetSpentError, DeadlineExceededError, FailureClass, PermanentError, ThrottledError
from spot_async.spending.prices import Prices, Size, Usage, read_usage
from spot_async.spending.rate_limit import LEASED, Grant, RateLimiter

FREE = Prices()


class Spending(msgspec.Struct, kw_only=True):
    """What was sent to one endpoint so far, and what that took."""

    requests: int = 0  # sent
    answered: int = 0
    failed: dict[str, int] = {}  # by class of failure
    uncounted: int = 0  # answered without a token count, so that the request's own size was booked
    prompt_tokens: int = 0
    cached_tokens: int = 0  # those of `prompt_tokens` that the endpoint had cached
    completion_tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    money: float = 0.0
    # Sent and never answered (time-outs, resets, 5xx, given up). Only the provider knows whether these were billed.
    unknown: int = 0
    unknown_tokens: int = 0  # their worst case
    unknown_money: float = 0.0  # their worst case

    def add(self, other: Spending) -> None:
        for name in self.__struct_fields__:
            if name != "failed":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, count in other.failed.items():
            self.failed[kind] = self.failed.get(kind, 0) + count


@dataclass(eq=False)
class Account:
    """The account of a role, shared by all its replicas.

    No budget is ever overdrawn, unless an endpoint bills more than the worst case of what it was asked.
    """

    role: str
    _: KW_ONLY
    prices: Prices | None = None
    budget: float | None = None
    token_budget: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    section: str = ""  # the key of the settings that say this; default: those of the role's backend

    def __post_init__(self) -> None:
        self.section = self.section or f"{self.role}.backend"
        self.is_limited = self.requests_per_minute is not None or self.tokens_per_minute is not None
        self.rate_limit = RateLimiter(self.requests_per_minute, self.tokens_per_minute)
        self.spending: dict[str, Spending] = {}  # by server
        self._in_flight: dict[Charge, tuple[str, Usage, float]] = {}  # server and worst case
        self._reserved_money = 0.0  # the worst case of all requests in flight
        self._reserved_tokens = 0
        self._settled = asyncio.Event()  # a request in flight has ended, so there may be room again
        self._spent: BudgetSpentError | None = None

    @property
    def is_metered(self) -> bool:
        """Whether there are prices or budgets. Otherwise nobody is told what was spent."""
        return self.prices is not None or self.token_budget is not None

    @property
    def currency(self) -> str:
        return (self.prices or FREE).currency

    @property
    def total(self) -> Spending:
        """What was sent to all endpoints together."""
        total = Spending()
        for each in self.spending.values():
            total.add(each)
        return total

    @property
    def in_flight(self) -> dict[str, Spending]:
        """What is under way to each server: what it took would not be known if this process died now."""
        found = {server: Spending() for server in self.spending}
        for server, at_most, money in self._in_flight.values():
            worst = Spending(requests=1, unknown=1, unknown_tokens=at_most.tokens, unknown_money=money)
            found[server].add(worst)
        return found

    @contextlib.asynccontextmanager
    async def request(
        self, server: str, size: Size, rate_limit: RateLimiter, deadline: float | None = None
    ) -> AsyncIterator[Charge]:
        """Wait until a request may leave; send it inside, and call `Charge.answered` with its reply.

        `deadline` (loop time) bounds the wait only, not what happens inside.

        Raises `BudgetSpentError` when the request's worst case no longer fits the budget. Raises
        `DeadlineExceededError` when it cannot leave by `deadline`, and `ThrottledError` at once where that is known
        beforehand: the endpoint asked for a longer pause.
        """
        async with _leaves_by(deadline, self._no_turn()):
            grant = await self._turn(server, rate_limit, size.counted.tokens, deadline)
        at_most = size.at_most
        money = (self.prices or FREE).highest_cost(at_most)
        try:
            async with _leaves_by(deadline, self._no_room()):
                await self._reserve(money, at_most.tokens)
        except BaseException:
            rate_limit.give_back(grant)
            raise
        rate_limit.send(asyncio.get_running_loop().time(), grant)
        charge = Charge(size)
        spending = self.spending.setdefault(server, Spending())
        self._in_flight[charge] = (server, at_most, money)
        try:
            yield charge
        except BaseException as error:
            self._book_failure(spending, error, charge, at_most, money)
            _hold(rate_limit, error)
            raise
        else:
            used = self._book(spending, charge)
            rate_limit.settle(asyncio.get_running_loop().time(), taken=grant.tokens, used=used.tokens)
        finally:
            spending.requests += 1
            spending.sent_bytes += charge.sent_bytes
            del self._in_flight[charge]
            self._reserved_money -= money
            self._reserved_tokens -= at_most.tokens
            self._settled.set()

    async def _turn(self, server: str, rate_limit: RateLimiter, tokens: int, deadline: float | None) -> Grant:
        """Wait for a turn. The first request under a lease uses the lease's grant; further ones get their own."""
        loop = asyncio.get_running_loop()
        # Under a lease, the pool has waited for the rate limit already, and keeps room for this request.
        grant = rate_limit.claim(LEASED.get()) or rate_limit.grant(tokens)
        try:
            while (delay_s := rate_limit.turn_s(loop.time(), grant)) > 0:
                held_s = rate_limit.held_s(loop.time())
                if deadline is not None and held_s > 0 and loop.time() + held_s >= deadline:
                    told = ThrottledError(f"{server}: asked to be left alone for another {held_s:,.0f} s", held_s)
                    told.was_sent = False
                    raise told
                await asyncio.sleep(delay_s)
        except BaseException:
            rate_limit.give_back(grant)
            raise
        return grant

    async def _reserve(self, money: float, tokens: int) -> None:
        """Reserve a request's worst case.

        Waits while it does not fit but may later, since requests in flight mostly turn out cheaper than their worst
        case. Raises `BudgetSpentError` when it would not fit even with nothing in flight.
        """
        while True:
            if self._spent is not None:
                raise self._spent
            if self._fits(money + self._reserved_money, tokens + self._reserved_tokens):
                break
            if not self._fits(money, tokens):
                self._spent = BudgetSpentError(self._what_is_spent(money, tokens))
                self._settled.set()
                raise self._spent
            self._settled.clear()
            await self._settled.wait()
        self._reserved_money += money
        self._reserved_tokens += tokens

    def _no_turn(self) -> str:
        return (
            f"{self.role}: no turn before the deadline: raise {self.section}.requests_per_minute or "
            "tokens_per_minute as far as the endpoint allows, or lower the concurrency of its stages"
        )

    def _no_room(self) -> str:
        return (
            f"{self.role}: no room in the budget before the deadline, since what is in flight may take all that is "
            "left: lower the concurrency of its stages, or raise the budget"
        )

    def _fits(self, money: float, tokens: int) -> bool:
        spent = self.total
        within_money = self.budget is None or spent.money + spent.unknown_money + money <= self.budget
        spent_tokens = spent.prompt_tokens + spent.completion_tokens + spent.unknown_tokens
        return within_money and (self.token_budget is None or spent_tokens + tokens <= self.token_budget)

    def _what_is_spent(self, money: float, tokens: int) -> str:
        spent = self.total
        key, limit, used, next_one = (
            ("token_budget", f"{self.token_budget}", f"{spent.prompt_tokens + spent.completion_tokens}", f"{tokens}")
            if self.budget is None or spent.money + spent.unknown_money + money <= self.budget
            else ("budget", f"{self.budget:g} {self.currency}", f"{spent.money:.6g}", f"{money:.3g}")
        )
        unknown = f", {spent.unknown} requests that may have been billed besides" if spent.unknown else ""
        return (
            f"{self.section}.{key}={limit} is spent: {used} for {spent.answered} answers{unknown}, and the next "
            f"request may take {next_one}; raise it, or continue with what is saved"
        )

    def _book(self, spending: Spending, charge: Charge) -> Usage:
        used = charge.stated or charge.size.counted
        spending.answered += 1
        spending.uncounted += charge.stated is None
        spending.prompt_tokens += used.prompt_tokens
        spending.cached_tokens += used.cached_tokens
        spending.completion_tokens += used.completion_tokens
        spending.received_bytes += charge.received_bytes
        spending.money += (self.prices or FREE).cost(used)
        return used

    def _book_failure(
        self, spending: Spending, error: BaseException, charge: Charge, at_most: Usage, money: float
    ) -> None:
        kind = type(error).__name__
        spending.failed[kind] = spending.failed.get(kind, 0) + 1
        # Providers do not bill what they refuse.
        if charge.was_sent and not isinstance(error, PermanentError | ThrottledError):
            spending.unknown += 1
            spending.unknown_tokens += at_most.tokens
            spending.unknown_money += money


class Charge:
    """The bill of one request that is under way."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.sent_bytes = 0
        self.received_bytes = 0
        self.stated: Usage | None = None
        self.was_sent = True  # until it is known that it never left

    def sent(self, body: bytes) -> None:
        self.sent_bytes = len(body)

    def answered(self, reply: bytes) -> Usage:
        """Note the reply; return the tokens that it states, or else those of the request's size."""
        self.received_bytes = len(reply)
        self.stated = read_usage(reply)
        return self.stated or self.size.counted


@contextlib.asynccontextmanager
async def _leaves_by(deadline: float | None, otherwise: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        late = DeadlineExceededError(otherwise)
        late.was_sent = False
        late.failure_class = FailureClass.THROTTLED  # it may wait again, as long as its request has time
        raise late from None


def _hold(rate_limit: RateLimiter, error: BaseException) -> None:
    if isinstance(error, ThrottledError) and error.retry_after_s is not None:
        rate_limit.hold(asyncio.get_running_loop().time(), error.retry_after_s)
