"""Log-probabilities of chosen tokens: by one request for all, or by many from servers that cannot choose."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from spot_async.base.tasks import gather
from spot_async.models.alignment import decision_row
from spot_async.types import FloatArray, IntArray, ScoreRequest

from .client import VllmClient
from .replies import NamedSpan

CANDIDATE_TOP_K = 64  # asked for at a position, before asking for single tokens that are not among these
SINGLE_REQUESTS = 128  # requests in flight at once for single positions or tokens

T = TypeVar("T")
Check = Callable[[Iterable[Sequence[NamedSpan]]], None]  # of the weights that each reply names


class Singles:
    """Requests for single positions or tokens, of which `SINGLE_REQUESTS` at most are in flight."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(SINGLE_REQUESTS)

    async def gather(self, requests: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Return results in order."""

        async def ask(request: Callable[[], Awaitable[T]]) -> T:
            async with self._free:
                return await request()

        return await gather(ask(request) for request in requests)


async def chosen_singly(
    client: VllmClient,
    singles: Singles,
    contexts: Sequence[IntArray],
    candidate_ids: IntArray,
    *,
    top_k: int,
    check: Check,
    deadline: float,
) -> FloatArray:
    """Return (N, k) by one request per context for its top-k, then one for each token that is not among those.

    `top_k` is the server's limit.
    """
    wide = min(top_k, CANDIDATE_TOP_K)
    widest = await singles.gather(
        functools.partial(client.distribution, context, top_k=wide, deadline=deadline) for context in contexts
    )
    found = [dict(zip(row.topk_ids[0].tolist(), row.topk_logprobs[0].tolist(), strict=True)) for row in widest]
    missing = [
        (n, token_id)
        for n, tokens in enumerate(candidate_ids.tolist())
        for token_id in tokens
        if token_id not in found[n]
    ]
    others = await singles.gather(
        functools.partial(client.next_token, contexts[n], token_id, deadline=deadline) for n, token_id in missing
    )
    check(row.spans for row in (*widest, *others))
    for (n, token_id), row in zip(missing, others, strict=True):
        found[n][token_id] = float(row.logprobs[0])
    rows = [[found[n][token_id] for token_id in tokens] for n, tokens in enumerate(candidate_ids.tolist())]
    return np.array(rows, np.float32).reshape(candidate_ids.shape)


async def chosen_at_once(
    client: VllmClient, request: ScoreRequest, positions: IntArray, candidate_ids: IntArray, *, check: Check
) -> FloatArray:
    """Return (N, k) by one request for all. It asks for no tokens at positions in between."""
    places = positions.tolist()
    # If a position is named twice, all its tokens are asked for in one row.
    wanted: dict[int, list[int]] = {}
    columns = []
    for position, tokens in zip(places, candidate_ids.tolist(), strict=True):
        row = wanted.setdefault(position, [])
        columns.append(len(row))
        row.extend(tokens)
    first, last = min(wanted), max(wanted)
    served = await client.chosen(
        [*request.prompt_ids.tolist(), *request.response_ids[: last + 1].tolist()],
        [wanted.get(position, []) for position in range(first, last + 1)],
        start=decision_row(len(request.prompt_ids), first),
        check=lambda spans: check([spans]),
        deadline=request.deadline,
    )
    count = candidate_ids.shape[1]
    return np.stack(
        [served[position - first, column : column + count] for position, column in zip(places, columns, strict=True)]
    )
