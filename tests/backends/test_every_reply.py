"""What each backend holds every reply to: its numbers can be, and it is no longer than what was asked for calls for."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sglang_stand_in
import vllm_stand_in
from aiohttp import web
from deadlines import soon

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.openai.dialect import COMPLETIONS, Dialect
from spot_async.backends.shared.bodies import ANSWER_BYTES
from spot_async.backends.shared.held_weights import HeldWeights
from spot_async.backends.shared.http import HttpEndpoint
from spot_async.base import wire
from spot_async.errors import PoisonedReplyError, TransientError
from spot_async.serving import api
from spot_async.testing.services import capabilities
from spot_async.types import Generation, SamplingSettings, ScoreRequest, TokenScores, VersionSpan

ENVELOPE_BYTES = 1000  # of a reply, whatever is in it
PROMPT, RESPONSE = sglang_stand_in.PROMPT, sglang_stand_in.RESPONSE
V0, VOCAB = sglang_stand_in.V0, sglang_stand_in.VOCAB
SECOND, CANDIDATES = np.array([2], np.int32), np.array([[9, 400, 83]], np.int32)

Asks = Mapping[str, Callable[[float], Awaitable[Any]]]  # each asks a server that raises log-probabilities by so much


def raised(reply: Any, nats: float) -> Any:
    """Return a reply in JSON whose numbers below 0, its log-probabilities, are larger by so much."""
    if isinstance(reply, dict):
        return {name: raised(value, nats) for name, value in reply.items()}
    if isinstance(reply, list):
        return [raised(value, nats) for value in reply]
    return reply + nats if isinstance(reply, float) and reply < 0 else reply


def score() -> ScoreRequest:
    return ScoreRequest(PROMPT, RESPONSE, 1.0, soon())


def sampling(max_tokens: int, *stops: int) -> SamplingSettings:
    return SamplingSettings(max_tokens=max_tokens, stop_token_ids=stops, seed=1)


@asynccontextmanager
async def served(backend: Any) -> AsyncIterator[dict[str, bytes]]:
    """Give the backend an endpoint, without discovery. Yields the endpoint's replies by path."""
    replies: dict[str, bytes] = {}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=replies[request.path])

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with HttpEndpoint("server", f"http://127.0.0.1:{runner.addresses[0][1]}") as endpoint:
            backend._server.endpoint = endpoint
            yield replies
    finally:
        await runner.cleanup()


@asynccontextmanager
async def vllm(model: Path, tmp_path: Path) -> AsyncIterator[Asks]:
    above = 0.0
    prompt, response = vllm_stand_in.PROMPT, np.tile(vllm_stand_in.RESPONSE, 4)
    asked = functools.partial(ScoreRequest, prompt, response, 1.0)
    async with vllm_stand_in.connecting(model, tmp_path)(compute=lambda table, _: table + above) as (backend, _):

        def asking(ask: Callable[[], Awaitable[Any]]) -> Callable[[float], Awaitable[Any]]:
            async def asked(nats: float) -> Any:
                nonlocal above
                above = nats
                return await ask()

            return asked

        yield {
            "generate": asking(lambda: backend.generate(prompt, sampling(20), top_k=8, deadline=soon())),
            "score": asking(lambda: backend.score(asked(soon()), top_k=8)),
            "score_at": asking(lambda: backend.score_at(asked(soon()), SECOND, top_k=8)),
            "candidates": asking(
                lambda: backend.candidate_logprobs(
                    asked(soon()), SECOND, np.array([[9, 40, 8]], np.int32), expected_version=V0
                )
            ),
        }


@asynccontextmanager
async def sglang(model: Path, tmp_path: Path) -> AsyncIterator[Asks]:
    async with sglang_stand_in.connected(model, tmp_path) as (backend, stand_in):

        def case(name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
            kept = sglang_stand_in.recorded(name)

            async def asked(nats: float) -> Any:
                stand_in.replies["/generate"] = [(200, json.dumps(raised(kept, nats)).encode())]
                return await ask()

            return asked

        yield {
            "generate": case("generate", lambda: backend.generate(PROMPT, sampling(6), top_k=3, deadline=soon())),
            "nested": case("generate nested", lambda: backend.generate(PROMPT, sampling(3), top_k=3, deadline=soon())),
            "score": case("score", lambda: backend.score(score(), top_k=4)),
            "score nested": case("score nested", lambda: backend.score(score(), top_k=4)),
            "candidates": case(
                "candidates",
                lambda: backend.candidate_logprobs(score(), SECOND, CANDIDATES, expected_version=V0),
            ),
        }


def endpoint_of(model: Path, tmp_path: Path, scoring: Any) -> OpenAIBackend:
    settings = OpenAIBackend.Settings(url="http://server")
    backend = OpenAIBackend(settings, role="teacher", model=str(model), run_directory=tmp_path)
    backend._found = capabilities(VOCAB, max_context_tokens=100, max_top_k=3, max_generation_top_k=3)
    backend._dialect = Dialect(
        model="m", token_id_prompts=True, extensions=True, sampled_token_ids=True, max_top_k=3, scoring=scoring
    )
    return backend


@asynccontextmanager
async def openai(model: Path, tmp_path: Path) -> AsyncIterator[Asks]:
    kept = json.loads((sglang_stand_in.RECORDED.parents[1] / "openai" / "vllm_0.32.0.json").read_text())
    prompt = np.array(kept["ids_echo"]["request"]["prompt"], np.int32)
    backend = endpoint_of(model, tmp_path, "echo")
    async with served(backend) as replies:

        def case(name: str, scoring: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
            async def asked(nats: float) -> Any:
                backend._dialect = dataclasses.replace(backend._dialect, scoring=scoring)
                replies[COMPLETIONS] = json.dumps(raised(kept[name]["reply"], nats)).encode()
                return await ask()

            return asked

        def scored() -> Awaitable[Any]:
            return backend.score(ScoreRequest(prompt[:4], prompt[4:], 1.0, soon()), top_k=1)

        yield {
            "generate": case(
                "generate", "echo", lambda: backend.generate(prompt, sampling(4, 2), top_k=2, deadline=soon())
            ),
            "echo": case("ids_echo", "echo", scored),
            "echo_and_generate": case("ids_echo_and_generate", "echo_and_generate", scored),
            "prompt_logprobs": case("ids_prompt_logprobs", "prompt_logprobs", scored),
        }


@asynccontextmanager
async def local(model: Path, tmp_path: Path) -> AsyncIterator[Asks]:
    tokens, top_k = 20, 3
    response = np.arange(5, 5 + tokens, dtype=np.int32)
    ids = np.arange(top_k, dtype=np.int32) + 40 + np.zeros((tokens, 1), np.int32)
    own, top = np.full(tokens, -9.0, np.float32), np.full((tokens, top_k), -2.0, np.float32)
    entropy = np.full(tokens, 2.0, np.float32)
    generation = Generation(
        token_ids=response, logprobs=own, finish_reason="length", version_spans=(VersionSpan(0, tokens, V0),),
        topk_ids=ids, topk_logprobs=top,
    )  # fmt: skip
    scores = TokenScores(
        logprobs=own, topk_ids=ids, topk_logprobs=top, entropy=entropy, entropy_lower=entropy, entropy_upper=entropy,
        version=V0,
    )  # fmt: skip
    few = api.CandidateReply(logprobs=top[:1], version=V0)
    backend = LocalBackend(LocalBackend.Settings(), role="student", model=str(model), run_directory=tmp_path)
    backend._capabilities, backend._held = capabilities(VOCAB, max_context_tokens=100), HeldWeights("student", V0)
    asked = functools.partial(ScoreRequest, PROMPT, response, 1.0)
    async with served(backend) as replies:

        def case(path: str, reply: Any, name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
            async def asked(nats: float) -> Any:
                changed = {name: getattr(reply, name) + np.float32(nats)}
                replies[path] = wire.encode(msgspec.structs.replace(reply, **changed))
                return await ask()

            return asked

        def generate() -> Awaitable[Any]:
            return backend.generate(PROMPT, sampling(tokens), top_k=top_k, deadline=soon())

        yield {
            "generate": case(api.GENERATE, generation, "logprobs", generate),
            "generate's top-k": case(api.GENERATE, generation, "topk_logprobs", generate),
            "score": case(api.SCORE, scores, "logprobs", lambda: backend.score(asked(soon()), top_k=top_k)),
            "candidates": case(
                api.CANDIDATE_LOGPROBS,
                few,
                "logprobs",
                lambda: backend.candidate_logprobs(asked(soon()), SECOND, CANDIDATES, expected_version=V0),
            ),
        }


@pytest.fixture(params=[vllm, sglang, openai, local], ids=lambda each: each.__name__)
def connect(request: pytest.FixtureRequest, random_model: Callable[..., Path], tmp_path: Path) -> Any:
    own_vocabulary = {} if request.param is vllm else {"vocab_size": VOCAB}
    return lambda: request.param(random_model(**own_vocabulary), tmp_path)


async def test_log_probabilities_above_0_are_refused_whatever_was_asked_for(connect: Any) -> None:
    async with connect() as asks:
        for ask in asks.values():
            await ask(0.0)
            with pytest.raises(PoisonedReplyError, match=r"values above 0|not a number|exceed 1 together") as caught:
                await ask(50.0)
            assert caught.value.exchange is not None  # what the dead letter has of it


async def test_a_score_that_was_given_up_may_be_asked_for_again_and_one_without_end_is_poisoned(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    backend = endpoint_of(random_model(vocab_size=VOCAB), tmp_path, "echo")
    async with served(backend) as replies:
        replies[COMPLETIONS] = b'{"choices": [{"text": "", "finish_reason": "abort"}]}'
        with pytest.raises(TransientError, match="aborted"):
            await backend.score(score(), top_k=1)
        replies[COMPLETIONS] = b'{"choices": ' + b"[" * 100_000
        with pytest.raises(PoisonedReplyError, match="cannot read the reply"):
            await backend.score(score(), top_k=1)


async def test_replies_are_well_below_what_their_requests_allow(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not counting what every answer may have beside its tokens: so long replies are too."""
    spare: list[int] = []
    request = HttpEndpoint._request

    async def noted(self: HttpEndpoint, *args: Any, largest: int = ANSWER_BYTES, **more: Any) -> None:
        before = self.traffic.received_bytes
        await request(self, *args, largest=largest, **more)
        spare.append(largest - ANSWER_BYTES - 2 * (self.traffic.received_bytes - before) + ENVELOPE_BYTES)

    async with connect() as asks:
        monkeypatch.setattr(HttpEndpoint, "_request", noted)
        for name, ask in asks.items():
            spare.clear()
            await ask(0.0)
            assert sum(spare) > 0, name
