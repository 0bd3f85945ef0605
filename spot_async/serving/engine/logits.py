"""What is made of logits: the next token of every row, and the scores of given tokens. Pure functions.

A request's randomness is one uniform number per token. They are all drawn from its seed before it starts, so that its
tokens do not depend on what is decoded beside it.

Given tokens are scored with the logits of only a few rows at a time. With a vocabulary of 150,000 those of one
4,096-token response take 2.5 GB in float32. In chunks they never exist all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from spot_async.types import Float64Array, Int64Array

Head = Callable[[torch.Tensor], torch.Tensor]  # hidden (R, D) -> logits (R, V)


class Sampled(NamedTuple):
    token_ids: torch.Tensor  # (n,) int64
    logprobs: torch.Tensor  # (n,) float32, of the untruncated distribution at the rows' temperatures
    topk_ids: torch.Tensor | None  # (n, largest k), descending by probability; a row uses its first k columns
    topk_logprobs: torch.Tensor | None  # (n, largest k)


def draw_uniforms(seed: int, count: int) -> Float64Array:
    """Return the first `count` uniforms of a request, in [0, 1)."""
    uniforms = np.random.Generator(np.random.Philox(seed)).random(count)
    return uniforms * (1 - 2.0**-52)  # so that u * total < total, however the product is rounded


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    uniforms: torch.Tensor,
    *,
    top_k: Int64Array | None = None,
    vocab_limit: torch.Tensor | None = None,
) -> Sampled:
    """Sample from logits (n, V) by inverse CDF, with temperature (n, 1), uniforms (n, 1) and top_p (n, 1).

    Rows with `top_p` of 1 or more are not truncated; None truncates no row. `top_k` (n,) is how many of the likeliest
    tokens to report for each row. Ids from `vocab_limit` (n, 1) on are not sampled; None allows all. The cumulative sum
    is float64.
    """
    scaled = logits.float() / temperature
    logprobs = scaled.log_softmax(-1)  # (n, V)
    if vocab_limit is not None:  # before the softmax, because the mass that is left may be too small for a float
        ids = torch.arange(logits.shape[-1], device=logits.device)
        scaled = scaled.masked_fill(ids >= vocab_limit, -torch.inf)
    probabilities = scaled.softmax(-1).double()  # not exp, whose rounding may depend on the place in the array
    if top_p is not None:
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(-1)
    token_ids = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)  # (n, 1)
    token_ids = token_ids.clamp_(max=logits.shape[-1] - 1)  # for NaN logits, whose rows the caller refuses
    chosen = logprobs.gather(-1, token_ids)
    topk_ids, topk_logprobs = (None, None) if top_k is None else _best(logprobs, top_k)
    return Sampled(token_ids[:, 0], chosen[:, 0], topk_ids, topk_logprobs)


def _best(logprobs: torch.Tensor, top_k: Int64Array) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return ids and values of each row's own top-k.

    Which of equally likely tokens comes first depends on k. So every k is looked up separately: a row's answer must not
    depend on what its neighbours ask for.
    """
    widest = int(top_k.max())
    if not widest:
        return None, None
    best = logprobs.topk(widest, dim=-1)
    for k in np.unique(top_k[(top_k > 0) & (top_k < widest)]).tolist():
        rows = torch.from_numpy(np.flatnonzero(top_k == k)).to(logprobs.device)
        fewer = logprobs[rows].topk(k, dim=-1)
        best.values[rows, :k], best.indices[rows, :k] = fewer.values, fewer.indices
    return best.indices, best.values


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return (n, V) with zeros outside of the smallest set of likeliest tokens whose mass reaches top_p."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # mass of all likelier tokens
    kept = (before < top_p) | (top_p >= 1)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered * kept)


class RowScores(NamedTuple):
    logprobs: torch.Tensor  # (R,) of the targets
    topk_ids: torch.Tensor  # (R, K)
    topk_logprobs: torch.Tensor  # (R, K)
    entropy: torch.Tensor  # (R,) nats, exact
    tail_logprobs: torch.Tensor | None  # (R,) of all tokens outside the top-k together; None for a top-k of 0


def score_rows(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, top_k: int, temperature: float, chunk_rows: int
) -> RowScores:
    """Return scores of hidden (R, D) for targets (R,). R is at least 1."""
    parts, tails = [], []
    for rows, logits in _logit_chunks(head, hidden, temperature, chunk_rows):
        logprobs, probabilities = logits.log_softmax(-1), logits.softmax(-1)
        best = logprobs.topk(top_k, dim=-1)
        chosen = logprobs.gather(-1, targets[rows, None])[:, 0]
        finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)  # so that 0 * -inf adds 0 and not NaN
        parts.append((chosen, best.indices, best.values, -(probabilities * finite).sum(-1)))
        if top_k:
            tails.append(tail_logprobs(probabilities, best.indices))
    chosen, topk_ids, topk_logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return RowScores(chosen, topk_ids, topk_logprobs, entropy, torch.cat(tails) if tails else None)


def tail_logprobs(probabilities: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities (R,) of all tokens outside a top-k (R, K) together. Overwrites `probabilities` (R, V).

    They are summed: what the top-k leaves of 1 would be rounding where it is nearly all.
    """
    others = probabilities.scatter_(-1, topk_ids, 0.0).sum(-1)
    return others.double().log().float()  # the rounding of float32's log may depend on the place in the array


def candidate_rows(
    head: Head, hidden: torch.Tensor, candidates: torch.Tensor, *, temperature: float, chunk_rows: int
) -> torch.Tensor:
    """Return log-probabilities (R, k) of candidates (R, k) at hidden (R, D). R is at least 1."""
    return torch.cat(
        [
            logits.log_softmax(-1).gather(-1, candidates[rows])
            for rows, logits in _logit_chunks(head, hidden, temperature, chunk_rows)
        ]
    )


def _logit_chunks(
    head: Head, hidden: torch.Tensor, temperature: float, chunk_rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        yield rows, head(hidden[rows]).float() / temperature
