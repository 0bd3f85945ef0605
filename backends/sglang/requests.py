"""Sends requests to SGLang's `/generate`: each under an id of its own, for the weights that it names, and with all
sampling parameters. Replies are read by `replies.py`.

What a request leaves out, SGLang takes from `--preferred-sampling-params`. None of that is the policy's distribution.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from spot_async.errors import DeadlineExceededError, RequestError
from spot_async.spending.prices import Size
from spot_async.types import Generation, IntArray, SamplingSettings, WeightVersion

from ..shared.bodies import Steps
from ..shared.held_weights import ReadName
from ..shared.remote import RemoteServer, gather_some
from ..shared.replies import check_end, check_generation, check_logprobs, check_topk
from ..shared.request_limits import RequestLimits, logit_bias
from .replies import NextToken, read_generation, read_next_token
from .weights import GENERATE, ModelInfo, ServerInfo

ABORT = "/abort_request"
ABORT_TIMEOUT_S = 2.0
POSITIONS_IN_FLIGHT = 32  # requests at a time for one call about single positions

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
}

T = TypeVar("T")

# Gives the adapter that one request is to name, if any, and what reads the names of weights in its reply.
AskedOf = Callable[[WeightVersion | None], contextlib.AbstractContextManager[tuple[str | None, ReadName]]]


class SglangRequests:
    """The requests to one server. `limits` and `neutral` fit it better once it has said its own limits and defaults."""

    def __init__(self, server: RemoteServer, asked_of: AskedOf, limits: RequestLimits) -> None:
        self._server = server
        self._asked_of = asked_of
        self.limits = limits
        self.neutral: Mapping[str, Any] = NEUTRAL

    async def sample(
        self, prompt_ids: IntArray, sampling: SamplingSettings, *, top_k: int, deadline: float
    ) -> Generation:
        """Sample with one request. Under a `vocab_limit` its log-probabilities are renormalised over the ids below."""
        body: dict[str, Any] = {
            "input_ids": prompt_ids.tolist(),
            "sampling_params": {
                **logit_bias(sampling, self.limits.vocab_size),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                **dict(sampling.further),
                "max_new_tokens": sampling.max_tokens,
                "stop_token_ids": sampling.stop_token_ids,
                "ignore_eos": not sampling.stop_token_ids,  # it would make the server ignore stop_token_ids too
                "sampling_seed": sampling.seed,
            },
            "return_logprob": True,
            **output_top_k(top_k),
        }

        def read(reply: bytes, names: ReadName) -> Steps[Generation]:
            generation = yield from read_generation(reply, names, top_k=top_k)
            check_end(self._server.name, generation, sampling)
            return check_generation(generation, sampling, top_k=top_k, vocab_size=self.limits.vocab_size)

        return await self.ask(body, read, deadline)

    async def ask(
        self,
        body: dict[str, Any],
        read: Callable[[bytes, ReadName], Steps[T]],
        deadline: float,
        expected: WeightVersion | None = None,
    ) -> T:
        """Send one request under its own id, and abort it by that id once it is abandoned.

        The server would notice the closed connection only after seconds. It aborts all ids with a given prefix, so ids
        have the same length.
        """
        request_id = uuid.uuid4().hex
        body = {**body, "sampling_params": {**self.neutral, **body["sampling_params"]}}
        new_tokens = max(1, body["sampling_params"]["max_new_tokens"])
        rows = new_tokens + len(body["input_ids"]) - body.get("logprob_start_len", len(body["input_ids"]))
        size = Size(
            prompt_tokens=len(body["input_ids"]),
            max_completion_tokens=new_tokens,
            logprobs=rows * (1 + body.get("top_logprobs_num", 0)) + len(body.get("token_ids_logprob", ())),
        )
        try:
            with self._asked_of(expected) as (adapter, names):
                weights = {} if adapter is None else {"lora_path": adapter}
                return await self._server.ask_in_steps(
                    GENERATE,
                    {"rid": request_id, **weights, **body},
                    lambda reply: read(reply, names),
                    deadline=deadline,
                    size=size,
                )
        except (asyncio.CancelledError, DeadlineExceededError):
            soon = asyncio.get_running_loop().time() + ABORT_TIMEOUT_S
            with contextlib.suppress(RequestError):
                await self._server.ask(ABORT, {"rid": request_id}, bytes, deadline=soon)
            raise

    async def next_tokens(
        self,
        asked: Iterable[tuple[IntArray, IntArray | None]],
        top_k: int,
        temperature: float,
        deadline: float,
        expected: WeightVersion | None = None,
    ) -> list[NextToken]:
        """Return the distribution after each prefix: its top-k, or the tokens given with the prefix.

        Where the server has several versions as adapters, that which is expected is asked for.
        """

        async def ask(prefix_ids: IntArray, chosen_ids: IntArray | None) -> NextToken:
            chosen = None if chosen_ids is None else chosen_ids.tolist()
            body = {
                "input_ids": prefix_ids.tolist(),
                "sampling_params": {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                **(output_top_k(top_k) if chosen is None else {"token_ids_logprob": chosen}),
            }

            def read(reply: bytes, names: ReadName) -> Steps[NextToken]:
                found = yield from read_next_token(reply, names, chosen)
                if found.top is not None:
                    check_topk(*found.top, (1, top_k), self.limits.vocab_size)
                if found.chosen is not None:
                    check_logprobs("candidate log-probabilities", found.chosen, found.chosen.shape)
                return found

            return await self.ask(body, read, deadline, expected)

        requests = list(asked)
        for prefix_ids, _ in requests:
            self.limits.check(prefix_ids, new_tokens=1, top_k=top_k)
        return await gather_some((partial(ask, *each) for each in requests), asyncio.Semaphore(POSITIONS_IN_FLIGHT))


def output_top_k(top_k: int) -> dict[str, Any]:
    """Return the fields that ask for the top-k of generated positions, as arrays if the server knows how."""
    if not top_k:
        return {}
    return {
        "top_logprobs_num": top_k,
        "return_flat_raw_output_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }


def neutral(model: ModelInfo, info: ServerInfo) -> dict[str, Any]:
    """Return the parameters with which one server samples from the model's own distribution.

    Whatever else it prefers is null, which SGLang takes for its own default: end texts, grammars, biases, and what
    later versions may add. A version that does not know a parameter would refuse it, so only what it names is sent.
    """
    watermark = {"watermark": {"enabled": False}} if info.enable_watermark else {}
    return {**dict.fromkeys(model.preferred_sampling_params or ()), **watermark, **NEUTRAL}
