"""Checks that scores are natural log-probabilities, and of the rows that predict the given tokens.

It asks a running server to score texts, and generates nothing. It stands above the backends, so it holds for every kind
of server and for backends of third parties. Two texts that differ in one token show where the rows are: the row that
predicts this token has the same text before it in both, and the next row has not.

A server alone cannot show everything. If its top-K leaves much of the probability out, neither the base of its
logarithms nor a temperature of its own can be seen (docs/check.md).

Axes: N known positions, T tokens, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from spot_async.checks.questions import Asked
from spot_async.errors import PermanentError
from spot_async.models.precision import NOISE_MARGIN
from spot_async.protocols import Scorer
from spot_async.types import Float64Array, IntArray, TokenScores

RIGHT = "right"
MOST_MASKED = 0.5  # share of positions
PROMPT_TOKENS = 24  # scored of each prompt, since an untrained student's response is no text
CHANGES = 2  # of each text that show something
ATTEMPTS = 8  # at that: a server that reads text may cut the changed one otherwise
LEAST_CHANGE_NATS = 1e-3
HIDING_NATS = 0.25  # noise of so much may hide a change
SURE_NATS = 0.05  # a row whose likeliest token costs less may stay as it is, as between the tokens of a chat template
UNIFORM_NATS = 0.1  # no token is likelier than 1 / V by more than this
SLACK = 0.05  # of probabilities and log-probabilities, for bfloat16
COARSE_DECIMALS = (0, 1, 2)
LEAST_VALUES = 20  # so few may be round by chance
USE_ANOTHER = "use another server or version (vLLM, SGLang and `spot-async serve` are right)"


@dataclass
class RowFindings:
    """What was found of a server's scores. With `faults` they must not be trained on. `notes` are worth a warning."""

    masked: float | None = None  # share of response tokens without a row; None if there were none
    order: str | None = None  # `order_words`; None if that cannot be seen
    alike: str | None = None  # how all rows are the same, if they are
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """Known rows, with the tokens that they are said to predict."""

    tokens: IntArray  # (N,)
    own: Float64Array  # (N,) log-probabilities of these tokens
    ids: IntArray  # (N, K)
    top: Float64Array  # (N, K) descending

    @classmethod
    def of(cls, texts: Sequence[_Text], scores: Sequence[TokenScores]) -> Rows:
        masks = [each.known for each in scores]
        pairs = list(zip(masks, scores, strict=True))
        return cls(
            np.concatenate([text.given[mask] for text, mask in zip(texts, masks, strict=True)]),
            np.concatenate([each.logprobs[mask].astype(np.float64) for mask, each in pairs]),
            np.concatenate([each.topk_ids[mask] for mask, each in pairs]),
            np.concatenate([each.topk_logprobs[mask].astype(np.float64) for mask, each in pairs]),
        )


@dataclass(frozen=True)
class _Text:
    before: IntArray
    given: IntArray  # (T,) the end of a prompt, and the response
    response_from: int

    @classmethod
    def of(cls, prompt: IntArray, response: IntArray) -> _Text:
        start = max(1, len(prompt) - PROMPT_TOKENS)
        return cls(prompt[:start], np.concatenate([prompt[start:], response]).astype(np.int32), len(prompt) - start)

    async def scored(self, scorer: Scorer, asked: Asked, top_k: int, given: IntArray | None = None) -> TokenScores:
        return await asked.scores(scorer, self.before, self.given if given is None else given, top_k=top_k)


async def check_score_rows(
    scorer: Scorer,
    asked: Asked,
    *,
    vocab_size: int,
    top_k: int,
    noise_nats: float,
    special: Container[int],
    run_top_k: int,
) -> RowFindings:
    """Score the texts of `asked`, and each again with one token replaced by another, none of the `special` ones.

    Rows are compared with `top_k`. Positions are masked as where the run asks, for its `run_top_k`.
    `noise_nats` is the largest difference seen between two computations of a row. Raises a `RequestError` if a text
    cannot be scored.
    """
    found = RowFindings()
    texts = [_Text.of(prompt, response) for prompt, response in zip(asked.prompts, asked.responses, strict=True)]
    scores = [await text.scored(scorer, asked, top_k) for text in texts]
    as_run = scores if run_top_k == top_k else [await text.scored(scorer, asked, run_top_k) for text in texts]
    of_responses = np.concatenate([each.known[text.response_from :] for text, each in zip(texts, as_run, strict=True)])
    if of_responses.size:
        found.masked = 1.0 - float(of_responses.mean())
    rows = Rows.of(texts, scores)
    if not rows.tokens.size:
        return found
    if (fault := value_fault(rows, vocab_size, NOISE_MARGIN * noise_nats)) is not None:
        found.faults.append(f"{fault}; {USE_ANOTHER}")
        return found
    found.alike = sameness(rows, vocab_size)
    if found.alike is not None:
        return found
    if (decimals := rounded_to(rows)) is not None:
        least = f"{0.5 * 10**-decimals:g}"
        found.notes.append(
            f"log-probabilities are rounded to {decimals} decimals: set logprob_noise_nats to {least} or more"
        )
    offsets = [
        offset
        for text, each in zip(texts, scores, strict=True)
        for offset in await _offsets(scorer, asked, text, each, noise_nats, special)
    ]
    # A row may stay as it is by chance, but none changes by chance.
    if offsets and (min(offsets) <= 0 or len(offsets) > 1):
        found.order = order_words(min(offsets))
        if found.order != RIGHT:
            found.faults.append(f"{found.order}; {USE_ANOTHER}")
    return found


def value_fault(rows: Rows, vocab_size: int, noise_nats: float) -> str | None:
    """Return why the numbers cannot be natural log-probabilities of one softmax; None if they can."""
    slack = SLACK + noise_nats
    values = np.column_stack([rows.own, rows.top])
    if not np.isfinite(values).all():
        return "log-probabilities are not numbers"
    if (values > slack).any():
        return f"log-probabilities are above 0 (up to {values.max():.2g}): these are no logarithms of probabilities"
    shown = np.exp(rows.top).sum(axis=1)
    most = shown + (vocab_size - rows.top.shape[1]) * np.exp(rows.top.min(axis=1))  # no other is likelier than these
    if (shown > math.exp(slack)).any() or (most < math.exp(-slack)).any():
        total = shown.max() if (shown > math.exp(slack)).any() else most.min()
        return (
            f"the probabilities of a row sum to {total:.2g}, not to 1: these are no natural logarithms, or not those "
            f"of one softmax of {vocab_size} tokens"
        )
    named = rows.ids == rows.tokens[:, None]
    in_row = np.where(named, rows.top, -np.inf).max(axis=1)
    off = np.where(named.any(axis=1), np.abs(rows.own - in_row), rows.own - rows.top[:, -1])
    if (off > slack).any():
        return "a token's log-probability is not the one that its own row gives it: they are of different rows"
    return None


def sameness(rows: Rows, vocab_size: int) -> str | None:
    """Return how all rows are alike, if they are: a model of that kind says nothing about a text."""
    if len(rows.top) < 2:
        return None
    if rows.top.max() < UNIFORM_NATS - math.log(vocab_size) or (rows.top.shape[1] > 1 and np.ptp(rows.top) == 0.0):
        return (
            f"its distributions are uniform: no token is likelier than {math.exp(rows.top.max()):.2g} anywhere, as of "
            "a model whose weights are lost"
        )
    if (np.sort(rows.ids, axis=1) == np.sort(rows.ids[0])).all() and np.ptp(rows.top, axis=0).max() < LEAST_CHANGE_NATS:
        return "its distribution is the same at every position, whatever stands before it"
    return None


def rounded_to(rows: Rows) -> int | None:
    """Return to how many decimals all log-probabilities are rounded; None if to more than two."""
    values = np.concatenate([rows.own, rows.top.ravel()])
    if values.size < LEAST_VALUES:
        return None
    return next((n for n in COARSE_DECIMALS if (np.abs(values * 10**n - np.rint(values * 10**n)) < 1e-3).all()), None)


async def _offsets(
    scorer: Scorer, asked: Asked, text: _Text, scores: TokenScores, noise_nats: float, special: Container[int]
) -> list[float]:
    """Return the `row_offset` of changes of the text, as far as they show one."""
    found: list[float] = []
    for at, token_id in islice(_changes(text, scores, asked.vocab_limit, special), ATTEMPTS):
        given = text.given.copy()
        given[at] = token_id
        top_k = scores.topk_ids.shape[1]
        try:
            other = await text.scored(scorer, asked, top_k, given)
            offset = row_offset(scores, other, at, noise_nats)
            if offset:  # the noise may be more than was seen before
                # In the other order, since two servers may answer in turn at one address.
                again = [await text.scored(scorer, asked, top_k, each) for each in (given, text.given)]
                nats = [differences(*pair) for pair in zip((other, scores), again, strict=True)]
                offset = row_offset(scores, other, at, max(noise_nats, *(float(np.nanmax(each)) for each in nats)))
        except PermanentError:  # it does not take this token
            continue
        found += [] if offset is None else [offset]
        if len(found) == CHANGES:
            break
    return found


def _changes(
    text: _Text, scores: TokenScores, vocab_limit: int | None, special: Container[int]
) -> Iterator[tuple[int, int]]:
    """Yield positions in the middle of the text, each with a token that is likely there, but is not there.

    Those before a token that is as good as certain come last, since its row may stay as it is.
    """
    has_row, best = scores.known, scores.topk_logprobs[:, 0]
    places = [at for at in range(1, len(text.given) - 1) if has_row[at] and has_row[at + 1]]
    places.sort(key=lambda at: (best[at + 1] > -SURE_NATS, abs(at - len(text.given) // 2)))
    for at in places:
        likely = [*scores.topk_ids[at].tolist(), *text.given.tolist()]
        for token_id in likely:
            is_common = vocab_limit is None or token_id < vocab_limit
            if token_id != text.given[at] and token_id not in special and is_common:
                yield at, token_id
                break


def row_offset(one: TokenScores, other: TokenScores, at: int, noise_nats: float) -> float | None:
    """Return how many rows too late the first one changes between two texts that differ in token `at`.

    Row `at` predicts this token. It and all before it must be equal, and row `at + 1` must differ: that is 0. Infinity
    means that no row changes, None that it cannot be seen, such as for noise, or where both texts have the next token
    as good as certain.
    """
    nats = differences(one, other)
    if not (np.isfinite(nats[at]) and np.isfinite(nats[at + 1])):
        return None
    least = max(LEAST_CHANGE_NATS, NOISE_MARGIN * noise_nats)
    changed = np.flatnonzero(nats > least)  # false where unknown
    offset = float(changed[0] - (at + 1)) if changed.size else math.inf
    is_sure = min(one.topk_logprobs[at + 1, 0], other.topk_logprobs[at + 1, 0]) > -max(SURE_NATS, least)
    return None if offset > 0 and (is_sure or least > HIDING_NATS) else offset


def order_words(offset: float) -> str:
    """Return `RIGHT`, or what such a `row_offset` means."""
    if offset == 0:
        return RIGHT
    if math.isinf(offset):
        return "its distributions do not follow the text: a changed token changes none of them after it"
    off = "one row off" if abs(offset) == 1 else f"{abs(offset):.0f} rows off"
    side = "after" if offset < 0 else "before"
    return f"scores are {off}: each token has the distribution {side} the one that predicts it"


def differences(one: TokenScores, other: TokenScores) -> Float64Array:
    """Return (T,) by how much the top-k of each row differ, in nats; NaN where a row is unknown."""
    nats = np.full(len(one.logprobs), np.nan)
    for t in np.flatnonzero(one.known & other.known).tolist():
        first, second = _row(one, t), _row(other, t)
        shared = [abs(first[token] - second[token]) for token in first.keys() & second.keys()]
        # A token that only one row shows is less likely in the other than all that this one shows.
        only = [first[token] - min(second.values()) for token in first.keys() - second.keys()]
        only += [second[token] - min(first.values()) for token in second.keys() - first.keys()]
        nats[t] = max([0.0, *shared, *only])
    return nats


def _row(scores: TokenScores, t: int) -> dict[int, float]:
    return dict(zip(scores.topk_ids[t].tolist(), scores.topk_logprobs[t].tolist(), strict=True))
