"""Discovery of what an OpenAI-compatible endpoint can do, even behind gateways that fail on what they cannot pass."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from spot_async.backends.openai.dialect import PLAIN_TEXT, Dialect, question, read_error
from spot_async.backends.openai.openai_discovery import discover
from spot_async.backends.shared.excerpts import UNREADABLE
from spot_async.backends.shared.failures import Access, FailedReply, classify
from spot_async.checks.capabilities import check_capabilities
from spot_async.config.loading import validate
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    Exchange,
    PermanentError,
    RequestError,
    TransientError,
)
from spot_async.testing.services import capabilities
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import PolicyNeeds

TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_file=str(Path(__file__).parents[1] / "recorded" / "openai" / "tokenizer.json"), eos_token="<|im_end|>"
)
IDS: list[int] = TOKENIZER.encode(PLAIN_TEXT)
VOCAB = 512
FAILED = (500, b"Internal Server Error")
MODELS = "/v1/models"

Answer = Callable[[str, Mapping[str, Any]], tuple[int, bytes]]


def completed(body: Mapping[str, Any], **changes: Any) -> tuple[int, bytes]:
    """A reply as vLLM or `spot-async serve` gives it, with even log-probabilities."""
    prompt = body["prompt"]
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    written = [5] * body["max_tokens"]
    shown = [*ids, *written] if body.get("echo") else written
    choice: dict[str, Any] = {"text": "x", "finish_reason": "length"}
    if body.get("return_token_ids"):
        choice |= {"token_ids": written, "prompt_token_ids": ids}
    if "logprobs" in body:
        names = [f"token_id:{each}" for each in shown]
        rows = [{f"token_id:{k}": -6.0 for k in {*range(body["logprobs"]), each}} for each in shown]
        is_first = [bool(body.get("echo")) and at == 0 for at in range(len(shown))]
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": [None if first else -6.0 for first in is_first],
            "top_logprobs": [None if first else row for first, row in zip(is_first, rows, strict=True)],
        }
    reply = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}, **changes}
    return 200, msgspec.json.encode(reply)


def good(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    """An endpoint that scores by `echo`."""
    if path == MODELS:
        return 200, b'{"data":[{"id":"m","max_model_len":100}]}'
    if path != "/v1/completions":
        return 404, b"Not Found"
    return (400, b"unknown field prompt_logprobs") if "prompt_logprobs" in body else completed(body)


def litellm(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    """LiteLLM's route `hosted_vllm/`, before such a server."""
    if isinstance(body.get("prompt"), list):
        return (
            500,
            b'{"error":{"message":"Unmapped prompt format. Your prompt is neither a list of strings nor a string."}}',
        )
    return good(path, body)


def transformers_serve(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    """`transformers serve` 5.23, on a machine without a cache of models."""
    if path == MODELS or body.get("max_tokens") == 0:
        return FAILED
    if body.keys() & {"prompt_logprobs", "return_token_ids", "top_k", "min_p", "repetition_penalty"}:
        return 422, b'{"detail":"Unexpected fields in the request"}'
    if isinstance(body.get("prompt"), list):
        return 400, b'{"detail":"prompt must be a string."}'
    return completed({key: body[key] for key in ("prompt", "max_tokens")})


class Endpoint:
    """In the place of a `RemoteServer`: what it says goes the way of every reply."""

    role = "teacher"
    name = "teacher"

    def __init__(self, answer: Answer, served_model: str | None = "m", answer_s: float = 0.0) -> None:
        self.answer = answer
        self.answer_s = answer_s
        self.settings = SimpleNamespace(served_model=served_model)
        vocabulary = SimpleNamespace(tokenizer=TOKENIZER, end_token_ids=(2,))
        self.files = SimpleNamespace(vocabulary=vocabulary, vocab_size=VOCAB)
        self.asked: Counter[str] = Counter()

    async def get(self, path: str, kind: Any, *, deadline: float) -> Any:
        return await self._ask(path, {}, msgspec.json.Decoder(kind).decode, deadline)

    async def ask(self, path: str, body: Any, decode: Any, *, deadline: float, size: object) -> Any:
        return await self._ask(path, body, decode, deadline)

    async def _ask(self, path: str, body: Any, decode: Any, deadline: float) -> Any:
        self.asked[question(path, body)] += 1
        if asyncio.get_running_loop().time() + self.answer_s > deadline:
            raise DeadlineExceededError(f"teacher{path}: no reply before the deadline")
        await asyncio.sleep(self.answer_s)
        status, said = self.answer(path, body)
        try:
            if status == 200:
                return decode(said)
            error: RequestError = read_error("teacher", status, said) or classify(
                f"teacher{path}", FailedReply(status, said)
            )
        except UNREADABLE as failure:
            error = classify(f"teacher{path}", failure)
        error.exchange = Exchange("http://h", "POST", path, 0, None, status)
        raise error


def asked(endpoint: Endpoint, *, deadline_s: float = 60.0) -> Dialect:
    return run_on_virtual_time(discover(endpoint, IDS, {}, deadline_s))  # type: ignore[arg-type]


def test_a_gateway_that_fails_over_token_ids_is_asked_again_once_and_then_for_text() -> None:
    endpoint = Endpoint(litellm)
    found = asked(endpoint)
    assert (found.token_id_prompts, found.scoring, found.max_top_k) == (False, "echo", 256)
    failed = {each: times for each, times in endpoint.asked.items() if "prompt: token ids" in each}
    assert list(failed.values()) == [2, 2]  # the best form and the plainest: nothing between them can be understood
    assert asked(Endpoint(good)) != found
    assert asked(Endpoint(good)).token_id_prompts


@pytest.mark.parametrize("spoilt", [FAILED, (502, b"<html>"), (200, b'{"choices":[]}'), (200, b"<html>")])
def test_trouble_that_passes_changes_nothing_of_what_is_found(spoilt: tuple[int, bytes]) -> None:
    """Whichever question it meets."""
    whole = Endpoint(good)
    expected = asked(whole)

    def spoilt_once(number: int) -> Answer:
        replies = itertools.count()
        return lambda path, body: spoilt if next(replies) == number else good(path, body)

    for number in range(whole.asked.total()):
        assert asked(Endpoint(spoilt_once(number))) == expected


def test_a_server_that_only_writes_says_what_it_was_asked_and_what_it_answered() -> None:
    found = asked(Endpoint(transformers_serve))
    assert (found.token_id_prompts, found.scoring, found.lists_models) == (False, None, False)
    form = "(asked /v1/completions {prompt: text, temperature: 1.0, max_tokens"
    assert found.unscored == (
        f"HTTP 422: Unexpected fields in the request {form}: 1, prompt_logprobs: 1, return_token_ids: true}}); "
        f"HTTP 500: Internal Server Error {form}: 0, echo: true, logprobs: 1}}); "
        f"no log-probabilities of the prompt in the answer {form}: 1, echo: true, logprobs: 1}})"
    )


def test_a_model_that_cannot_be_named_is_refused_with_the_answer_to_the_question_for_it() -> None:
    with pytest.raises(ConfigError) as refused:
        asked(Endpoint(transformers_serve, served_model=None))
    assert str(refused.value) == (
        "teacher.backend.served_model: required, since the endpoint serves no list (HTTP 500: Internal Server "
        "Error (asked /v1/models))"
    )


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (lambda path, body: (404, b"Not Found"), ConfigError, "HTTP 404: Not Found"),
        (lambda path, body: FAILED, TransientError, "HTTP 500: Internal Server Error"),
        (lambda path, body: (400, b"no such name as m"), ConfigError, "HTTP 400: no such name as m"),
    ],
)
def test_an_endpoint_that_understands_nothing_is_refused_with_its_answer_before_the_questions(
    answer: Answer, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as refused:
        asked(Endpoint(answer))
    assert type(refused.value) is kind
    advice = "; the url is what comes before /v1" if "404" in said else ""
    assert str(refused.value) == (
        "teacher.backend.url: answers neither /v1/completions nor /v1/chat/completions: "
        f"{said} (asked /v1/models, and 6 other questions){advice}"
    )


@pytest.mark.parametrize(
    "said",
    [
        b'{"error":{"message":"No connected db.","type":"no_db_connection","param":null,"code":"400"}}',  # LiteLLM
        b'{"error":{"code":400,"message":"API key not valid. Please pass a valid API key."}}',  # Google
        b'{"error":{"code":400,"message":"API key expired. Please renew the API key."}}',  # Google
        b'{"error":{"message":"Malformed API Key passed in.","code":"400"}}',  # LiteLLM
    ],
)
def test_a_key_that_is_refused_with_400_is_named_at_the_first_question(said: bytes) -> None:
    endpoint = Endpoint(lambda path, body: (400, said))
    with pytest.raises(PermanentError) as refused:
        asked(endpoint)
    assert endpoint.asked.total() == 1
    assert len(str(refused.value)) < 200
    access = Access("teacher.backend", "http", ["api_key_env"])
    error = classify("teacher/v1/models", FailedReply(400, said), access=access)
    assert str(error).endswith("; check the key that teacher.backend.api_key_env names")


def test_a_directory_with_more_tokens_than_the_served_model_is_named() -> None:
    def narrow(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        if isinstance(body.get("prompt"), list) and max(body["prompt"]) >= VOCAB - 1:
            return 400, b'{"error":{"message":"Token id 511 is out of vocabulary"}}'
        return good(path, body)

    with pytest.raises(ConfigError) as refused:
        asked(Endpoint(narrow))
    assert str(refused.value) == (
        "teacher.model: its config.json says vocab_size=512, but the endpoint refuses token 511: give the served "
        "model's directory: HTTP 400: Token id 511 is out of vocabulary"
    )


def test_a_gateway_that_takes_a_list_of_ids_for_as_many_prompts_is_asked_for_text() -> None:
    def batching(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        if isinstance(body.get("prompt"), list):
            return 200, msgspec.json.encode({"choices": [{"text": "x"}] * len(body["prompt"])})
        return good(path, body)

    assert not asked(Endpoint(batching)).token_id_prompts


def test_an_endpoint_that_is_too_slow_says_what_it_answered_until_then() -> None:
    with pytest.raises(DeadlineExceededError, match=r"before the deadline; HTTP 500: Unmapped .*token ids"):
        asked(Endpoint(litellm, answer_s=5.0), deadline_s=20.0)


def test_a_refusal_of_another_temperature_means_that_there_is_only_one() -> None:
    def warm(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        return (500, b"no") if body.get("temperature", 1.0) != 1.0 else good(path, body)

    found = asked(Endpoint(warm))
    assert (found.score_temperature, found.generation_temperature) == ("one", "one")


def test_noise_of_single_tokens_is_not_taken_for_another_temperature() -> None:
    """An endpoint in 16 bits, whose log-probabilities are at temperature 1 whatever a request says."""

    def noisy(path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        code, reply = good(path, body)
        if body.get("temperature", 1.0) != 1.0:
            found = msgspec.json.decode(reply)
            logprobs = found["choices"][0]["logprobs"]
            logprobs["token_logprobs"][2:3] = [-6.2]
            logprobs["top_logprobs"][-1] = dict.fromkeys(logprobs["top_logprobs"][-1], -6.02) | {"token_id:5": -6.15}
            reply = msgspec.json.encode(found)
        return code, reply

    found = asked(Endpoint(noisy))
    assert (found.score_temperature, found.generation_temperature) == ("one", "one")


def test_a_run_that_needs_scores_is_refused_with_what_the_endpoint_answered() -> None:
    config = validate(
        {
            "student": {"model": "m"},
            "teacher": {"model": "m", "backend": {"kind": "openai", "url": "http://h"}},
            "policy": {"kind": "opd"},
            "data": {"train": "problems.jsonl"},
            "training": {"iterations": 1, "batch_size": 1, "mini_batch_size": 1},
        }
    )
    student = capabilities(VOCAB, max_top_k=8)
    teacher = msgspec.structs.replace(student, max_top_k=0, unscored="asked /x: HTTP 500: no")
    with pytest.raises(ConfigError, match=r"scores no given tokens, .* \(asked /x: HTTP 500: no\)$"):
        check_capabilities(config, PolicyNeeds(teacher_top_k=1), {"student": student, "teacher": teacher})
