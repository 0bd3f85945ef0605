"""What `/v1` refuses and how it says so, a server that is full, clients that go away: over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from served_model import ENDLESS, KEY, ServedModel, completing
from server_on_thread import serving

VOCAB = 300
SLOTS = 4
WAITING = 4
PROMPT = "w3 w14 w15"


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Path:
    return random_model(vocab_size=VOCAB, max_position_embeddings=20000)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServedModel]:
    with serving(model, key=KEY, slots=SLOTS, max_waiting=WAITING) as url:
        yield ServedModel(url, model)


@pytest.fixture(scope="module")
def process(model: Path, running_server: Any) -> Iterator[ServedModel]:
    """The same as a user starts it."""
    with running_server(model, "--slots", str(SLOTS), "--max-waiting", str(WAITING), key=KEY) as url:
        yield ServedModel(url, model)


@pytest.fixture(params=["server", pytest.param("process", marks=pytest.mark.long)])
def either(request: pytest.FixtureRequest) -> ServedModel:
    served: ServedModel = request.getfixturevalue(request.param)
    return served


@pytest.fixture(scope="module")
def client(server: ServedModel) -> Iterator[openai.OpenAI]:
    with server.client() as it:
        yield it


@pytest.fixture(scope="module")
def complete(server: ServedModel, client: openai.OpenAI) -> Callable[..., Any]:
    return completing(server, client, PROMPT)


# -- clients that go away --


async def hang_up(server: ServedModel, body: dict[str, Any]) -> None:
    """Send a request over a socket of our own, wait until it runs, and close the socket."""
    text = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    await writer.drain()
    await asyncio.to_thread(server.until, lambda found: found.active > 0)
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_hangs_up_gives_its_slots_back(either: ServedModel):
    before = either.stats().tokens_generated
    body = {"prompt": PROMPT, "max_tokens": ENDLESS, "ignore_eos": True}
    await hang_up(either, body)
    found = either.until_idle()
    assert found.tokens_generated - before < ENDLESS / 2


async def test_more_than_the_server_can_take_is_told_to_come_back(either: ServedModel):
    async with either.async_client() as many:
        fields: dict[str, Any] = {"model": either.model.name, "prompt": PROMPT, "max_tokens": ENDLESS}
        more = {"ignore_eos": True}
        running = [
            asyncio.create_task(many.completions.create(**fields, extra_body=more)) for _ in range(SLOTS + WAITING)
        ]
        await asyncio.to_thread(either.until, lambda found: found.active == SLOTS and found.waiting == WAITING)
        with pytest.raises(openai.InternalServerError, match="8 completions are being worked on") as refused:
            await many.completions.create(**fields)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        for each in running:
            each.cancel()
        await asyncio.wait(running)
    await asyncio.to_thread(either.until_idle)
    with either.client() as client:
        assert completing(either, client, PROMPT)(max_tokens=2).usage.completion_tokens == 2


# -- what is refused --


def test_a_wrong_key_is_refused_in_the_client_s_own_words(server: ServedModel):
    with server.client("wrong") as client:
        for ask in (client.models.list, lambda: client.completions.create(model="m", prompt="a")):
            with pytest.raises(openai.AuthenticationError, match="needs the server's API key") as refused:
                ask()
            assert refused.value.code == "invalid_api_key"
            assert KEY not in str(refused.value)


def test_an_unknown_model_and_an_unknown_route_are_not_found(server: ServedModel, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match=f"`gpt-9` does not exist; this server has `{server.model.name}`"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions: is not served"):
        client.chat.completions.create(model="gpt-9", messages=[])


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(complete):
    with pytest.raises(openai.BadRequestError, match="context is 20000 tokens, but the prompt has 19999") as refused:
        complete([5] * 19999, max_tokens=2)
    assert refused.value.code == "context_length_exceeded"
    assert complete([5] * 3, max_tokens=1).usage.total_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logit_bias": {"5": 3}}, "logit_bias", "is not served here"),
        ({"presence_penalty": 0.5}, "presence_penalty", "is not served here"),
        ({"suffix": "end"}, "suffix", "is not served here"),
        ({"best_of": 3}, "best_of", "is not served"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "ask for echo with logprobs"),
        ({"top_k": 5}, "top_k", "is not served here"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": 1.5}, "top_p", "<= 1"),
        ({"max_tokens": 0}, "max_tokens", "needs echo"),
        ({"max_tokens": "many"}, "max_tokens", "expected `int"),
        ({"logprobs": 301}, "logprobs", "at most 300"),
        ({"logprobs": 300, "max_tokens": 19000}, "logprobs", "at most 4,194,304 are served"),
        ({"stream": True}, "stream", "is not served here; leave it out, and the whole reply comes at once"),
        ({"stop": "a"}, "stop", "is not served here; give stop_token_ids, or cut the text yourself"),
        ({"n": 2}, "n", "is not served here; ask as often"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "is not served here"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "length <= 1024"),
        ({"prompt": [[5]] * 100_000}, "prompt", "must be one text or the token ids of one: send several at once"),
        ({"stop_token_ids": [300]}, None, "stop_token_ids holds 300: the vocabulary has 300 tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is not served here"),
        ({"prompt": []}, "prompt", "has no tokens"),
        ({"prompt": ["a", 3]}, "prompt", "must be one text or the token ids of one"),
        ({"prompt": ""}, "prompt", "has no tokens"),
        ({"prompt": [300]}, None, "holds 300: the vocabulary has 300 tokens"),
        ({"prompt": None}, "prompt", "expected"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: ServedModel, fields: dict[str, Any], param: str, message: str
):
    body = {"prompt": PROMPT, "stream": False, **fields}
    reply = server.post("/v1/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert param is None or error["message"].startswith(param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON: Input data was truncated"),
        (b"{", "not valid JSON: Input data was truncated"),
        (b"{prompt: 1}", "not valid JSON: JSON is malformed: "),
        (b"[1]", "expected `object`, got `array`"),
        (b'"\xff"', ""),
        (b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "it is nested too deep"),
        (b'{"prompt": [5], "user":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "it is nested too deep"),
    ],
)
def test_a_body_that_is_no_request_is_a_bad_request(server: ServedModel, body: bytes, message: str):
    reply = server.post("/v1/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"cannot read the request: {message}")


def test_fields_without_effect_here_are_ignored(complete):
    neutral = {
        "user": "me",
        "presence_penalty": 0,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "stop": [],
        "n": 1,
        "unheard_of": 3,
    }
    plain, with_more = complete(seed=1), complete(seed=1, more=neutral)
    assert plain.choices == with_more.choices
    assert plain.usage.completion_tokens == 16, "OpenAI's default of max_tokens"
