"""Requests of the `openai` backend have the same fields during discovery and after it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
from aiohttp import web
from deadlines import passed_once, soon

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.openai.dialect import NEUTRAL
from spot_async.base.retry import QUESTION_TIMEOUT_S
from spot_async.checks.questions import Asked, honours_seeds
from spot_async.errors import ConfigError, PermanentError, ThrottledError
from spot_async.models.files import read_model
from spot_async.types import SamplingSettings

TOKENIZER = Path(__file__).parents[1] / "recorded" / "openai" / "tokenizer.json"
PROMPT = np.array([3, 4, 5], np.int32)
SAMPLING = SamplingSettings(temperature=0.7, top_p=0.9, max_tokens=3, stop_token_ids=(1,), seed=11)
UNBENT = {name: values[0] for name, values in NEUTRAL.items()}


class Endpoint:
    """Takes and gives token ids, and refuses what it is told to; says the same whatever it is asked."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.refused: Sequence[str] = ("prompt_logprobs", "echo")
        self.least: Mapping[str, float] = {}  # of values that are not refused
        self.throttled = 0  # of so many requests
        self.throttling = asyncio.Event()
        self.completions = True
        self.reads_ids = True
        self.response, self.finish_reason = [9, 8, 1], "stop"
        self.respond: Callable[[dict[str, Any]], list[int]] | None = None  # with this instead
        self.status = 200  # of the list of models

    async def answer(self, request: web.Request) -> web.Response:
        if self.throttled:
            self.throttled -= 1
            self.throttling.set()
            return web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "0"})
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]}, status=self.status)
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        self.requests.append(body)
        if not self.reads_ids and not isinstance(body.get("prompt", ""), str):
            return web.json_response({"error": {"message": "prompt: must be text"}}, status=400)
        low = [name for name, least in self.least.items() if body.get(name, least) < least]
        wrong = next((name for name in [*low, *self.refused] if name in body), None)
        if wrong is not None:
            return web.json_response({"error": {"message": f"{wrong}: not known here"}}, status=400)
        if request.path == "/v1/chat/completions":
            return web.json_response({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]})
        if not self.completions:
            return web.json_response({"detail": "Not Found"}, status=404)
        if body.get("echo"):
            return web.json_response(self._echo(body["prompt"]))
        response = self.respond(body) if self.respond is not None else self.response
        count = min(body["max_tokens"], len(response))
        logprobs = {
            "tokens": [f"token_id:{each}" for each in response[:count]],
            "token_logprobs": [-1.0] * count,
            "top_logprobs": [{"token_id:9": -1.0}] * count,
        }
        reply = {"logprobs": logprobs, "finish_reason": self.finish_reason if count > 1 else "length"}
        return web.json_response({"choices": [{**reply, "token_ids": response[:count]}]})

    def _echo(self, prompt: list[int]) -> dict[str, Any]:
        """Tokens by their text, as SGLang names them."""
        tokenizer = read_model("teacher", str(self.model)).vocabulary.tokenizer
        tokens = [tokenizer.decode([each]) for each in prompt] + ["x"]
        rows = [None, *({text: -1.0} for text in tokens[1:])]
        logprobs = {"tokens": tokens, "token_logprobs": [None, *[-1.0] * len(prompt)], "top_logprobs": rows}
        return {
            "choices": [{"logprobs": logprobs, "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(prompt)},
        }


@pytest.fixture
def endpoint(random_model: Callable[..., Path]) -> Endpoint:
    return Endpoint(random_model(seed=4))


@asynccontextmanager
async def connected(endpoint: Endpoint, **settings: Any) -> AsyncIterator[OpenAIBackend]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    model, directory = str(endpoint.model), endpoint.model
    chosen = OpenAIBackend.Settings(url=url, **settings)
    try:
        async with OpenAIBackend(chosen, role="teacher", model=model, run_directory=directory) as backend:
            yield backend
    finally:
        await runner.cleanup()


async def test_a_response_ends_at_its_stop_tokens_and_is_not_truncated_by_a_servers_own_defaults(endpoint: Any) -> None:
    async with connected(endpoint) as backend:
        await backend.capabilities(deadline=soon())
        probes = list(endpoint.requests)
        written = await backend.generate(PROMPT, SAMPLING, deadline=soon())
    sent = endpoint.requests[-1]
    assert written.finish_reason == "stop"
    assert sent["stop_token_ids"] == [1]
    assert "ignore_eos" not in sent  # beside it SGLang would look at no stop_token_ids
    assert {name: sent[name] for name in UNBENT} == UNBENT
    assert any(probe.keys() == sent.keys() for probe in probes)


@pytest.mark.parametrize(
    ("third_token", "honoured"),
    [
        (lambda body, asked: body.get("seed", 0) % 7 + 3, True),
        (lambda body, asked: asked % 7 + 3, False),  # as SGLang without --enable-deterministic-inference
        (lambda body, asked: 3, None),  # says nothing of seeds
    ],
)
async def test_seeds_are_said_to_be_honoured_where_they_were_seen_to_be(
    endpoint: Any, third_token: Callable[[dict[str, Any], int], int], honoured: bool | None
) -> None:
    endpoint.respond = lambda body: [9, 8, third_token(body, len(endpoint.requests)), 1]
    async with connected(endpoint) as backend:
        assert await honours_seeds(backend, Asked([PROMPT], [], (1,)), max_tokens=4) is honoured


async def test_a_ping_costs_nothing_and_a_busy_endpoint_is_not_a_dead_one(endpoint: Any) -> None:
    async with connected(endpoint) as backend:
        for status in (200, 404, 429):
            endpoint.status = status
            await backend.ping(deadline=soon())
        endpoint.status = 503
        with pytest.raises(ThrottledError):
            await backend.ping(deadline=soon())
    assert endpoint.requests == []


async def test_what_an_endpoint_refuses_of_the_extensions_is_left_out_and_what_the_user_says_stands(
    endpoint: Any,
) -> None:
    endpoint.refused = ("prompt_logprobs", "echo", "min_p")
    async with connected(endpoint, request_fields={"top_k": 20}) as backend:
        await backend.generate(PROMPT, SAMPLING, deadline=soon())
    sent = endpoint.requests[-1]
    assert (sent["top_k"], sent["repetition_penalty"]) == (20, 1.0)
    assert "min_p" not in sent


async def test_an_endpoint_whose_top_k_is_switched_off_by_0_alone_gets_0(endpoint: Any) -> None:
    endpoint.least = {"top_k": 0}  # as llama-cpp-python, whose default is 40
    async with connected(endpoint) as backend:
        await backend.generate(PROMPT, SAMPLING, deadline=soon())
    assert endpoint.requests[-1]["top_k"] == 0


@pytest.mark.parametrize("completions", [True, False])
async def test_an_endpoint_that_refuses_a_field_of_every_request_is_refused_at_the_start(
    endpoint: Any, completions: bool
) -> None:
    endpoint.refused, endpoint.completions = ("prompt_logprobs", "echo", "seed"), completions
    async with connected(endpoint) as backend:
        with pytest.raises(ConfigError, match=r"teacher\.backend\.url: .*seed: not known here"):
            await backend.capabilities(deadline=soon())


async def test_a_chat_endpoint_gets_the_same_defaults(endpoint: Any) -> None:
    endpoint.refused, endpoint.completions = ("max_completion_tokens", "min_p"), False
    async with connected(endpoint) as backend:
        found = await backend.capabilities(deadline=soon())
    sent = endpoint.requests[-1]
    assert found.server == "OpenAI-compatible: chat only"
    assert sent.keys() >= {"temperature", "top_p", "seed", "max_tokens"}
    assert backend._dialect.neutral == {name: value for name, value in UNBENT.items() if name != "min_p"}
    asked = msgspec.structs.replace(SAMPLING, further=(("top_k", 20),))
    assert backend._dialect.sampling_fields(asked) == {**backend._dialect.sampling_fields(SAMPLING), "top_k": 20}
    with pytest.raises(PermanentError, match="this endpoint takes no min_p: leave it out"):
        backend._dialect.sampling_fields(msgspec.structs.replace(SAMPLING, further=(("min_p", 0.1),)))


async def test_a_start_waits_for_an_endpoint_that_is_busy_but_not_for_ever(endpoint: Any) -> None:
    endpoint.throttled = 2
    async with connected(endpoint) as backend:
        assert (await backend.capabilities(deadline=soon())).sampled_token_ids
    endpoint.throttled = 1000
    endpoint.throttling.clear()
    async with connected(endpoint) as backend, passed_once(endpoint.throttling, QUESTION_TIMEOUT_S + 1.0):
        with pytest.raises(ThrottledError, match="slow down"):
            await backend.capabilities(deadline=soon())
    assert endpoint.throttled, "it was given up"


@pytest.mark.parametrize("response", [[9, 8], [9, 8, 7]])
async def test_an_end_token_that_only_the_server_knows_is_named(endpoint: Any, response: list[int]) -> None:
    endpoint.response = response
    async with connected(endpoint) as backend:
        with pytest.raises(PermanentError, match=rf"ends responses at token {response[-1]}, .*: name it in"):
            await backend.generate(PROMPT, SAMPLING, deadline=soon())


def make_byte_level(model: Path) -> None:
    shutil.copy(TOKENIZER, model)
    config = model / "config.json"
    config.write_bytes(msgspec.json.encode({**msgspec.json.decode(config.read_bytes()), "vocab_size": 512}))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (model / "tokenizer_config.json").write_bytes(msgspec.json.encode(tokenizer))


async def test_a_control_token_in_letters_is_not_sent_to_an_endpoint_that_would_read_it_as_a_token(
    endpoint: Any,
) -> None:
    endpoint.reads_ids = False
    make_byte_level(endpoint.model)
    vocabulary = read_model("teacher", str(endpoint.model)).vocabulary
    token, letters = vocabulary.encode("<|im_end|>"), vocabulary.encode("<|im_end|")
    letters = np.append(letters, vocabulary.encode(">"))
    async with connected(endpoint) as backend:
        await backend.generate(np.append(token, letters[:-1]), SAMPLING, deadline=soon())
        assert endpoint.requests[-1]["prompt"] == "<|im_end|><|im_end|"
        asked = len(endpoint.requests)
        with pytest.raises(PermanentError, match=r"in letters, '<\|im_end\|>', as the token: use an endpoint"):
            await backend.generate(np.append(token, letters), SAMPLING, deadline=soon())
    assert len(endpoint.requests) == asked


async def test_an_endpoint_that_names_tokens_by_text_does_not_promise_every_position(endpoint: Any) -> None:
    async with connected(endpoint) as backend:
        assert (await backend.capabilities(deadline=soon())).max_top_k == 0
    endpoint.refused = ("prompt_logprobs",)
    make_byte_level(endpoint.model)
    async with connected(endpoint) as backend:
        found = await backend.capabilities(deadline=soon())
    assert found.max_top_k > 0
    assert found.token_id_prompts
    assert not found.every_position


def test_a_server_to_launch_is_refused_in_one_line() -> None:
    with pytest.raises(pydantic.ValidationError, match="kind openai starts no server: give the url") as refused:
        OpenAIBackend.Settings.model_validate({"launch": {"python": "python"}})
    assert len(refused.value.errors()) == 1
