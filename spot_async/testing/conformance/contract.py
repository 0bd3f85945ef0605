"""Defines what a check of the contract is: pytest runs it as a test, on the backend that `plugin.py` has started.

Below are the comparisons that checks make. Axes: T response positions, K served top-k, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from spot_async.errors import SpotError
from spot_async.testing.conformance.subject import PROMPT_TOKENS, Subject
from spot_async.types import Capabilities, Float64Array, IntArray, TokenScores

# A difference up to this many times the tolerance is looked at once more. In float32, rounding alone takes one of some
# 200,000 log-probabilities beyond 2e-5 nats (2.4e-5 is the largest seen), and some checks compare 8,000. A real error
# is far off, or a little off every time.
A_LITTLE = 2.5


@dataclass(frozen=True)
class Finding:
    """What a check that passed has seen."""

    note: str
    nats: float | None = None  # the largest difference to the exact values


class Violation(AssertionError):
    """Raised when the contract is broken. The message is one line."""

    def __init__(self, note: str, nats: float | None = None) -> None:
        super().__init__(note)
        self.note = note
        self.nats = nats


def not_offered(reason: str) -> BaseException:
    """Return what a check raises of something that the backend's capabilities leave out."""
    return pytest.skip.Exception(f"not offered: {reason}")


@dataclass(frozen=True)
class Feature:
    """A part of the contract that a backend may leave out, if its capabilities say so."""

    is_offered: Callable[[Capabilities], bool]
    otherwise: str
    part_of: Feature | None = None  # without which there is none of it

    def why_not(self, said: Capabilities) -> str | None:
        """Return why it is not offered; None if it is."""
        of_the_whole = None if self.part_of is None else self.part_of.why_not(said)
        return of_the_whole or (None if self.is_offered(said) else self.otherwise)


GENERATION = Feature(lambda said: said.generation, "the endpoint only scores")
TOKENS = Feature(
    lambda said: said.sampled_token_ids,
    "responses are text that is tokenised again: for KD and evaluation only",
    GENERATION,
)
SCORES = Feature(lambda said: said.max_top_k > 0, "the endpoint scores no given tokens")
POSITIONS = Feature(lambda said: said.max_position_top_k > 0, "no single positions in more detail")
CANDIDATES = Feature(lambda said: said.candidate_logprobs != "none", "no log-probabilities of chosen tokens")
UPDATES = Feature(lambda said: said.weight_update, "the endpoint takes no weights", TOKENS)
PARITY = ("generation_parity", "score_parity", "candidates")  # checks that many others build on


@dataclass(frozen=True)
class Check:
    """One clause of the contract. It is left out if a check that it builds on did not pass."""

    name: str
    ask: Callable[[Subject], Awaitable[Finding]]
    of: Feature | None  # the feature that it checks; None if every backend must have it
    after: Sequence[str]

    async def run(self, subject: Subject) -> Finding:
        """Raise `Violation` if the contract is broken, and pytest's `skip` if that is not asked."""
        if self.of is not None and (why := self.of.why_not(subject.capabilities)) is not None:
            raise not_offered(why)
        try:
            if (broken := next((name for name in self.after if name in subject.broken), None)) is not None:
                subject.broken.add(self.name)
                raise pytest.skip.Exception(f"not checked: builds on {broken}")
            return await self._ask_again(subject)
        except Violation:
            subject.broken.add(self.name)
            raise

    async def _ask_again(self, subject: Subject) -> Finding:
        """Ask, and ask again with new samples if it is only a little beyond the tolerance."""
        try:
            return await self._ask(subject)
        except Violation as first:
            if first.nats is None or first.nats > A_LITTLE * subject.tolerance_nats:
                raise
            before = f"; up to {first.nats:.2g} nats off the first time"
        try:
            again = await self._ask(subject)
        except Violation as second:
            raise Violation(f"{second}{before}", second.nats) from None
        return replace(again, note=f"{again.note}{before}")

    async def _ask(self, subject: Subject) -> Finding:
        try:
            return await self.ask(subject)
        except Violation:
            raise
        except SpotError as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        except Exception as error:  # a backend is someone else's program
            raise Violation(f"raised {type(error).__name__}, which is none of ours: {error}") from error


CHECKS: dict[str, Check] = {}  # all that are defined, by name


def check(
    of: Feature | None = None, *, after: Sequence[str] = ()
) -> Callable[[Callable[[Subject], Awaitable[Finding]]], Callable[..., None]]:
    """Make a test of a coroutine function that asks a backend."""

    def decorate(ask: Callable[[Subject], Awaitable[Finding]]) -> Callable[..., None]:
        found = Check(ask.__name__.removeprefix("test_"), ask, of, after)
        CHECKS[found.name] = found

        def test(run_check: Callable[[Check], Finding], record_property: Callable[[str, object], None]) -> None:
            broken = None
            try:
                said: Finding | Violation = run_check(found)
            except Violation as violation:
                said = broken = violation
            record_property("note", said.note)
            if said.nats is not None:
                record_property("nats", said.nats)
            if broken is not None:
                pytest.fail(broken.note, pytrace=broken.__cause__ is not None)

        test.__name__, test.__doc__ = ask.__name__, ask.__doc__
        return test

    return decorate


Rows = Float64Array  # exact log-probabilities (T, V)

INNER = slice(1, -1)  # all rows but the first and the last, which have checks of their own
ENDS = [0, -1]


def of_tokens(exact: Rows, token_ids: npt.ArrayLike) -> Float64Array:
    """Return the exact log-probabilities of token ids (T,) or (T, K), in the same shape."""
    ids = np.asarray(token_ids)
    return np.take_along_axis(exact, ids.reshape(len(exact), -1), axis=1).reshape(ids.shape)


def largest(served: npt.ArrayLike, exact: npt.ArrayLike) -> float:
    """Return the largest absolute difference in nats: infinite if there is a NaN, 0 for empty arrays."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.asarray(served, np.float64) - np.asarray(exact, np.float64))
    return float(np.where(np.isnan(difference), math.inf, difference).max(initial=0.0))


def largest_of_topk(exact: Rows, topk_ids: npt.ArrayLike, topk_logprobs: npt.ArrayLike) -> float:
    """Return `largest` for a top-k (T, K): for the served ids, and for the ids that should have been served.

    The order of two tokens with the same probability does not matter, so ids are judged by their log-probabilities.
    """
    served = np.asarray(topk_logprobs)
    best = -np.sort(-exact, axis=1)[:, : served.shape[1]]
    return max(largest(served, of_tokens(exact, topk_ids)), largest(served, best))


def largest_of_scores(exact: Rows, response: IntArray, scores: TokenScores) -> float:
    """Return `largest` for the known positions but the first and the last, which have checks of their own."""
    positions = np.flatnonzero(scores.known)
    here = positions[(positions > 0) & (positions < len(scores.logprobs) - 1)]
    return largest(scores.logprobs[here], of_tokens(exact, response)[here])


async def scored(subject: Subject, number: int) -> float:
    """Score a response once, and return the largest difference to the exact log-probabilities, in nats."""
    prompt = subject.prompt(100 + number, PROMPT_TOKENS + number % 7)
    response = subject.tokens(8 + number % 23, seed=100 + number)
    scores = await subject.score(prompt, response)
    return largest_of_scores(await subject.exact(prompt, response), response, scores)


async def chosen(subject: Subject, number: int) -> float:
    """Do as `scored` with two tokens of a response that are asked for by themselves."""
    prompt = subject.prompt(100 + number, PROMPT_TOKENS + number % 7)
    response = subject.tokens(8 + number % 23, seed=100 + number)
    positions = np.array([1, len(response) - 2], np.int32)
    served = await subject.candidates(prompt, response, positions, response[positions][:, None])
    exact = await subject.exact(prompt, response)
    return largest(served[:, 0], of_tokens(exact, response)[positions])


def require(holds: bool, otherwise: str, nats: float | None = None) -> None:
    if not holds:
        raise Violation(otherwise, nats)


async def require_refusal(request: Awaitable[object], error: type[SpotError], otherwise: str) -> None:
    """Await a request that must raise this error."""
    try:
        await request
    except error:
        return
    raise Violation(otherwise)


def require_close(nats: float, tolerance_nats: float, what: str) -> None:
    require(nats <= tolerance_nats, f"{what} differ by up to {nats:.2g} nats from the model's", nats)


def nucleus_mass_before(exact: Rows, token_ids: npt.ArrayLike) -> Float64Array:
    """Return the probability (T,) of all tokens likelier than the sampled one, which is below `top_p` if honoured."""
    own = of_tokens(exact, token_ids)
    mass: Float64Array = np.where(exact > own[:, None], np.exp(exact), 0.0).sum(axis=1)
    return mass


def log_kept_mass(exact: Rows, top_p: float) -> Float64Array:
    """Return the log of the probability that sampling with `top_p` leaves, (T,)."""
    ordered = -np.sort(-np.exp(exact), axis=1)
    before = ordered.cumsum(axis=1) - ordered
    kept: Float64Array = np.log(np.where(before < top_p, ordered, 0.0).sum(axis=1))
    return kept


def entropy(exact: Rows) -> Float64Array:
    """Return the entropy of each row in nats, (T,)."""
    values: Float64Array = -(np.exp(exact) * np.where(np.isneginf(exact), 0.0, exact)).sum(axis=1)
    return values
