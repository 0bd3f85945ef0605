"""Sends requests to one vLLM server: to sample responses, to score given tokens, and to score chosen tokens.

It returns numbers as the server gives them. `backend.py` adds versions, entropies and capabilities. Log-probabilities
of chosen tokens take one request for all, or many where the server cannot choose.
"""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spot_async.errors import PermanentError, PoisonedReplyError, RequestError, TransientError
from spot_async.models.alignment import branch_prefix_length, decision_row
from spot_async.spending.prices import Size
from spot_async.types import FloatArray, IntArray, ScoreRequest

from ..shared.bodies import Steps
from ..shared.held_weights import NamedSpan
from ..shared.remote import RemoteServer, gather_some
from ..shared.replies import ABORTED, check_logprobs, check_rows
from .replies import Answer, CompletionsRoute, GenerateRoute, read_npy, read_prompt_row, read_table

SCALE_OUT = b"--enable-scale-out"
# What a request leaves out, the server takes from the model's generation_config.json, from
# --override-generation-config or, for a watermark, from --watermark-config. Versions that do not know one ignore it.
NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "watermarking": False,
}

T = TypeVar("T")


class NoSuchRouteError(PermanentError):
    """The server does not serve this path: it is too old, or was started without it."""


class Sampled(NamedTuple):
    """One response."""

    token_ids: IntArray  # (T,)
    logprobs: FloatArray  # (T,)
    topk_ids: IntArray  # (T, K)
    topk_logprobs: FloatArray  # (T, K) descending
    finish_reason: str  # stop or length
    spans: Sequence[NamedSpan]


class Scored(NamedTuple):
    """Rows of given tokens."""

    logprobs: FloatArray  # (T,)
    topk_ids: IntArray  # (T, K)
    topk_logprobs: FloatArray  # (T, K) descending


def read_error(role: str, status: int, body: bytes) -> RequestError | None:
    """Return a refusal in vLLM's terms; None if there is nothing to add. With the role given, a `http.ReadError`."""
    if status == 404 and b'"error"' not in body:  # a 404 about the model has an error in its body
        return NoSuchRouteError(f"{role}: HTTP 404: the server has no such route")
    if status == 403 and SCALE_OUT in body:
        return PermanentError(
            f"{role}.backend: the server takes no token ids: add --enable-scale-out to its command and restart it"
        )
    return None


@dataclass(eq=False)
class VllmClient:
    """The client of one server. It uses the best route that the server has. `model` is the name in requests."""

    server: RemoteServer
    model: str = ""
    route: GenerateRoute | CompletionsRoute = field(default_factory=GenerateRoute)

    async def sample(
        self, prompt: list[int], parameters: Mapping[str, Any], *, top_k: int, logprobs: int, deadline: float
    ) -> Sampled:
        """Sample a response by SamplingParams of vLLM. The sampled token may take one of the `logprobs`."""
        return await self.sample_as(
            lambda sampled: sampled, prompt, parameters, top_k=top_k, logprobs=logprobs, deadline=deadline
        )

    async def sample_as(
        self,
        make: Callable[[Sampled], T],
        prompt: list[int],
        parameters: Mapping[str, Any],
        *,
        top_k: int,
        logprobs: int,
        deadline: float,
    ) -> T:
        """Return what `make` makes of a sampled response. Its errors become errors of this reply."""

        def read(answer: Answer) -> Steps[T]:
            token_ids = np.array(answer.token_ids, np.int32)
            if len(answer.token_rows) != len(token_ids):
                raise PoisonedReplyError(f"{len(answer.token_rows)} log-probabilities of {len(token_ids)} tokens")
            table = yield from read_table(answer.token_rows, self.route.read_row, width=logprobs + 1)
            top, own = table.top(top_k), table.of_tokens(token_ids)
            check_rows(token_ids, own, *top, top_k=top_k, vocab_size=self.server.files.vocab_size)
            return make(Sampled(token_ids, own, *top, answer.finish_reason, answer.spans))

        return await self._ask(prompt, {**parameters, "logprobs": logprobs}, read, deadline=deadline)

    async def score(
        self,
        prompt: list[int],
        response: list[int],
        *,
        top_k: int,
        check: Callable[[Sequence[NamedSpan]], None] = lambda spans: None,
        deadline: float,
    ) -> Scored:
        """Score a response at temperature 1, the only one in every mode of the server. `check` is as in `chosen`.

        Never send `skip_reading_prefix_cache` with it: vLLM would crash.
        """
        count = len(prompt) + len(response)

        def read(answer: Answer) -> Steps[Scored]:
            check(answer.spans)
            if len(answer.prompt_rows) != count:
                raise PoisonedReplyError(f"{len(answer.prompt_rows)} rows of {count} tokens")
            # vLLM's row i is the distribution that decides token i, so rows are shifted by one from `decision_row`.
            rows = answer.prompt_rows[branch_prefix_length(len(prompt), 0) :]
            table = yield from read_table(rows, read_prompt_row, width=top_k + 1)
            response_ids = np.array(response, np.int32)
            scored = Scored(table.of_tokens(response_ids), *table.top(top_k))
            yield
            check_rows(response_ids, *scored, top_k=top_k, vocab_size=self.server.files.vocab_size)
            return scored

        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        return await self._ask(prompt + response, parameters, read, deadline=deadline)

    async def next_token(self, prefix: IntArray, token_id: int, *, deadline: float) -> Sampled:
        """Score a chosen token after a prefix. Only it may be sampled, which does not change raw log-probabilities."""
        parameters = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "allowed_token_ids": [token_id]}
        sampled = await self.sample(prefix.tolist(), parameters, top_k=0, logprobs=0, deadline=deadline)
        if sampled.token_ids.tolist() != [token_id]:
            raise PoisonedReplyError(
                f"{self.server.name}: sampled {sampled.token_ids} where only {token_id} was allowed"
            )
        return sampled

    async def distribution(self, prefix: IntArray, *, top_k: int, deadline: float) -> Sampled:
        """Return the top-k after a prefix. The likeliest token is sampled, so that it takes no other token's place."""
        parameters = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        sampled = await self.sample(prefix.tolist(), parameters, top_k=top_k, logprobs=top_k, deadline=deadline)
        if len(sampled.token_ids) != 1:
            raise PoisonedReplyError(f"{self.server.name}: {len(sampled.token_ids)} tokens where one was asked for")
        return sampled

    async def chosen(
        self,
        token_ids: list[int],
        rows: list[list[int]],
        *,
        start: int,
        check: Callable[[Sequence[NamedSpan]], None] = lambda spans: None,
        deadline: float,
    ) -> FloatArray:
        """Return log-probabilities (R, k) of `rows`' ids at the output rows from `start` on. Short rows end in -inf.

        `check` gets the weights that the reply names. This needs a server with the V2 model runner, 0.32 or later.
        Others give a `PermanentError`.
        """

        def read(answer: Answer) -> Steps[FloatArray]:
            check(answer.spans)
            if answer.chosen is None:
                raise PoisonedReplyError("no log-probabilities of the chosen tokens")
            yield
            array = read_npy(base64.b64decode(answer.chosen), (len(rows), max(map(len, rows))))
            asked = np.arange(array.shape[1]) < np.array([len(row) for row in rows])[:, None]
            check_logprobs("log-probabilities of chosen tokens", array[asked], (int(asked.sum()),))
            return array

        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprob_token_ids": rows}
        return await self._ask(token_ids, {**parameters, "prompt_logprob_start": start}, read, deadline=deadline)

    async def _ask(
        self,
        token_ids: list[int],
        parameters: Mapping[str, Any],
        read: Callable[[Answer], Steps[T]],
        *,
        deadline: float,
    ) -> T:
        def decode(reply: bytes) -> Steps[T]:
            answer = self.route.read(reply)
            self._check_finished(answer)
            yield
            return (yield from read(answer))

        body = self.route.body(self.model, token_ids, {**NEUTRAL, **parameters})
        size = Size(
            prompt_tokens=len(token_ids),
            max_completion_tokens=parameters["max_tokens"],
            logprobs=_logprobs_asked(len(token_ids), parameters),
        )
        return await self.server.ask_in_steps(self.route.path, body, decode, deadline=deadline, size=size)

    def _check_finished(self, answer: Answer) -> None:
        if answer.finish_reason in ABORTED:
            raise TransientError(
                f"{self.server.name}{self.route.path}: the server gave up after {len(answer.token_ids)} tokens "
                f"(finish reason {answer.finish_reason!r})"
            )
        if answer.finish_reason not in ("stop", "length"):
            raise PoisonedReplyError(f"finish reason {answer.finish_reason!r} is unknown")


def _logprobs_asked(prompt_tokens: int, parameters: Mapping[str, Any]) -> int:
    """Return how many log-probabilities a reply may have. Each token's own comes along."""
    of_prompt: int = prompt_tokens * (1 + parameters["prompt_logprobs"]) if "prompt_logprobs" in parameters else 0
    of_sampled: int = parameters["max_tokens"] * (1 + parameters.get("logprobs", 0))
    chosen = parameters.get("prompt_logprob_token_ids", [])  # the reply fills all rows up to the longest
    return of_prompt + of_sampled + len(chosen) * max(map(len, chosen), default=0)


CANDIDATE_TOP_K = 64  # asked for at a position, before asking for single tokens that are not among these
SINGLE_REQUESTS = 128  # requests in flight at once for single positions or tokens

Check = Callable[[Iterable[Sequence[NamedSpan]]], None]  # of the weights that each reply names


async def chosen_singly(
    client: VllmClient,
    places: asyncio.Semaphore,
    contexts: Sequence[IntArray],
    candidate_ids: IntArray,
    *,
    top_k: int,
    check: Check,
    deadline: float,
) -> FloatArray:
    """Return (N, k) by one request per context for its top-k, then one for each token that is not among those.

    `top_k` is the server's limit, and `places` are those of requests in flight.
    """
    wide = min(top_k, CANDIDATE_TOP_K)
    widest = await gather_some(
        (functools.partial(client.distribution, context, top_k=wide, deadline=deadline) for context in contexts), places
    )
    found = [dict(zip(row.topk_ids[0].tolist(), row.topk_logprobs[0].tolist(), strict=True)) for row in widest]
    missing = [
        (n, token_id)
        for n, tokens in enumerate(candidate_ids.tolist())
        for token_id in tokens
        if token_id not in found[n]
    ]
    asked = (functools.partial(client.next_token, contexts[n], token_id, deadline=deadline) for n, token_id in missing)
    others = await gather_some(asked, places)
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
