"""The `openai` backend against real servers, with all of their API and with less of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from limited_endpoint import EXTENSIONS, limited_endpoint
from parity import soon
from server_process import RunningServer
from tiny_models import make_plain_model
from transformers import AutoTokenizer

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.errors import PermanentError
from spot_async.types import IntArray, SamplingSettings, ScoreRequest, TokenScores

Dense = Callable[[Path, Sequence[int]], npt.NDArray[np.float32]]
SENTENCE = "One half equals the sum: 12 + 7 = \\boxed{19}.\nThis number is even because of our answer."
TOLERANCE_NATS = 2e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain_model(tmp_path_factory.mktemp("plain") / "teacher", seed=3)


@pytest.fixture(scope="module")
def server(start_vllm: Callable[..., AbstractContextManager[RunningServer]], model: Path) -> Iterator[RunningServer]:
    with start_vllm(model, "--max-logprobs", "40") as running:
        yield running


def backend(url: str, model: Path, **settings: Any) -> OpenAIBackend:
    chosen = OpenAIBackend.Settings(url=url, **settings)
    return OpenAIBackend(chosen, role="teacher", model=str(model), run_directory=model)


def prompt_and_response(model: Path, response: str = SENTENCE) -> tuple[Any, IntArray, IntArray]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Why é?"}], add_generation_prompt=True)
    ids = tokenizer.encode(response + "<|im_end|>")
    return tokenizer, np.array(chat["input_ids"], np.int32), np.array(ids, np.int32)


def check_scores_are_exact(scores: TokenScores, dense: npt.NDArray[np.float32], response: IntArray, k: int) -> None:
    """Against (T, V) rows of transformers, wherever the scores are not masked."""
    valid = np.ones(len(response), np.bool_) if scores.valid is None else scores.valid
    own = dense[np.arange(len(response)), response]
    best = -np.sort(-dense, axis=1)[:, :k]
    np.testing.assert_allclose(scores.logprobs[valid], own[valid], atol=TOLERANCE_NATS, rtol=0)
    np.testing.assert_allclose(scores.topk_logprobs[valid], best[valid], atol=TOLERANCE_NATS, rtol=0)
    named = np.take_along_axis(dense, scores.topk_ids, axis=1)
    np.testing.assert_allclose(named[valid], scores.topk_logprobs[valid], atol=TOLERANCE_NATS, rtol=0)
    entropy = -(np.exp(dense.astype(np.float64)) * dense).sum(axis=1)
    assert (scores.entropy_lower[valid] <= entropy[valid] + 1e-5).all()
    assert (entropy[valid] - 1e-5 <= scores.entropy_upper[valid]).all()


def rows(dense_logprobs: Dense, model: Path, prompt: IntArray, response: IntArray) -> npt.NDArray[np.float32]:
    everything = dense_logprobs(model, [*prompt.tolist(), *response.tolist()])
    return everything[len(prompt) - 1 : -1]


async def test_a_vllm_endpoint_scores_token_ids_exactly_with_as_many_candidates_as_it_allows(
    server: RunningServer, model: Path, dense_logprobs: Dense
) -> None:
    _, prompt, response = prompt_and_response(model)
    async with backend(server.url + "/v1", model) as teacher:
        found = await teacher.capabilities(deadline=soon())
        scores = await teacher.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=16)
    assert (found.max_top_k, found.token_id_prompts, found.sampled_token_ids) == (40, True, True)
    assert (found.score_temperature, found.generation_temperature) == ("one", "one")
    assert found.logprob_noise_nats < TOLERANCE_NATS
    assert scores.valid is None
    check_scores_are_exact(scores, rows(dense_logprobs, model, prompt, response), response, 16)


LIMITS = {
    "echo, token ids": ({"prompt_logprobs"}, True),
    "text, rows by id": (set(), False),
    "echo of text, by id": ({"prompt_logprobs"}, False),
    "echo of token ids, by text": (EXTENSIONS, True),
    "echo of text, by text": (EXTENSIONS, False),
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_every_dialect_gives_the_same_numbers_where_it_gives_any(
    server: RunningServer, model: Path, dense_logprobs: Dense, limit: str
) -> None:
    ignores, token_id_prompts = LIMITS[limit]
    _, prompt, response = prompt_and_response(model)
    async with (
        limited_endpoint(server.url, ignores=ignores, token_id_prompts=token_id_prompts) as url,
        backend(url, model) as teacher,
    ):
        found = await teacher.capabilities(deadline=soon())
        scores = await teacher.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=4)
    assert found.token_id_prompts == token_id_prompts
    assert found.max_top_k == 40
    known = 1.0 if scores.valid is None else float(scores.valid.mean())
    assert known > 0.8 if limit.endswith("by text") else known == 1.0
    check_scores_are_exact(scores, rows(dense_logprobs, model, prompt, response), response, 4)


@pytest.fixture(scope="module")
def sglang(start_sglang: Callable[..., AbstractContextManager[RunningServer]], model: Path) -> Iterator[RunningServer]:
    with start_sglang(model) as running:
        yield running


@pytest.mark.parametrize("limit", [None, "echo of token ids, by text", "echo of text, by text"])
async def test_sglang_names_tokens_by_text_and_is_read_all_the_same(
    sglang: RunningServer, model: Path, dense_logprobs: Dense, limit: str | None
) -> None:
    ignores, token_id_prompts = LIMITS[limit] if limit is not None else (set(), True)
    _, prompt, response = prompt_and_response(model)
    async with (
        limited_endpoint(sglang.url, ignores=ignores, token_id_prompts=token_id_prompts) as url,
        backend(url, model) as teacher,
    ):
        found = await teacher.capabilities(deadline=soon())
        scores = await teacher.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=16)
        sampling = SamplingSettings(max_tokens=9, stop_token_ids=(2,), seed=7)
        written = await teacher.generate(prompt, sampling, deadline=soon())
    assert (found.token_id_prompts, found.sampled_token_ids) == (token_id_prompts, limit is None)
    assert (found.score_temperature, found.generation_temperature) == ("one", "request")
    assert scores.valid is None or scores.valid.mean() > 0.8
    check_scores_are_exact(scores, rows(dense_logprobs, model, prompt, response), response, 16)
    assert 0 < len(written.token_ids) <= 9


async def test_sglang_ends_responses_at_the_requests_own_stop_tokens(sglang: RunningServer, model: Path) -> None:
    _, prompt, _ = prompt_and_response(model)
    # It ignores seeds; the likeliest token is ahead by 0.007 nats at one place.
    sampling = SamplingSettings(temperature=1e-4, max_tokens=9, stop_token_ids=(2,), seed=7)
    async with backend(sglang.url, model) as student:
        found = await student.capabilities(deadline=soon())
        free = (await student.generate(prompt, sampling, deadline=soon())).token_ids.tolist()
        stopping = msgspec.structs.replace(sampling, stop_token_ids=(2, free[3]))
        ended = await student.generate(prompt, stopping, deadline=soon())
    assert (found.token_id_prompts, found.every_position) == (True, False)
    assert ended.token_ids.tolist() == free[: free.index(free[3]) + 1]
    assert ended.finish_reason == "stop"


async def test_text_prompts_mask_what_the_server_tokenises_differently(
    server: RunningServer, model: Path, dense_logprobs: Dense
) -> None:
    """Our response spells a word in single characters where the tokenizer has a longer token for them."""
    tokenizer, prompt, _ = prompt_and_response(model)
    spelt = [i for char in "equals" for i in tokenizer.encode(char)]
    start = tokenizer.encode("the sum ")
    response = np.array([*start, *spelt, *tokenizer.encode(": 12.\n<|im_end|>")], np.int32)
    assert len(spelt) == 6 > len(tokenizer.encode("equals"))
    async with limited_endpoint(server.url, ignores=()) as url, backend(url, model) as teacher:
        scores = await teacher.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=4)
    assert scores.valid is not None
    assert not scores.valid[len(start) : len(start) + 6].any()
    assert scores.valid[-3:].all()  # the end token, which text carries, among them
    # What follows differently cut text is conditioned on those tokens: the same text, not the same numbers.
    read = tokenizer.encode(tokenizer.decode([*prompt.tolist(), *response.tolist()]))
    dense = dense_logprobs(model, read)[:-1]
    np.testing.assert_allclose(scores.logprobs[-3:], dense[-3:][range(3), response[-3:]], atol=TOLERANCE_NATS, rtol=0)


async def test_responses_carry_the_servers_token_ids_seeds_and_ends(server: RunningServer, model: Path) -> None:
    _, prompt, _ = prompt_and_response(model)
    sampling = SamplingSettings(max_tokens=24, stop_token_ids=(2,), seed=7)
    async with backend(server.url, model) as teacher:
        first, again, other = [
            await teacher.generate(prompt, each, top_k=3, deadline=soon())
            for each in (sampling, sampling, SamplingSettings(max_tokens=24, stop_token_ids=(2,), seed=8))
        ]
        stop = int(first.token_ids[3])
        stopping = SamplingSettings(max_tokens=24, stop_token_ids=(2, stop), seed=7)
        ended = await teacher.generate(prompt, stopping, deadline=soon())
        scores = await teacher.score(ScoreRequest(prompt, first.token_ids, 1.0, soon()), top_k=3)
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert first.token_ids.tolist() != other.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, scores.logprobs, atol=TOLERANCE_NATS, rtol=0)
    assert first.topk_ids is not None
    np.testing.assert_array_equal(first.topk_ids, scores.topk_ids)
    assert ended.token_ids.tolist() == first.token_ids.tolist()[: first.token_ids.tolist().index(stop) + 1]
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("chat_only", [True, False])
async def test_endpoints_that_only_write_say_so_and_write(server: RunningServer, model: Path, chat_only: bool) -> None:
    tokenizer, prompt, response = prompt_and_response(model)
    ignores = {*EXTENSIONS, "logprobs", "echo"}
    async with (
        limited_endpoint(server.url, ignores=ignores, chat_only=chat_only) as url,
        backend(url, model) as teacher,
    ):
        found = await teacher.capabilities(deadline=soon())
        assert (found.max_top_k, found.generation, found.sampled_token_ids) == (0, True, False)
        sampling = SamplingSettings(max_tokens=12, stop_token_ids=(2,), seed=7)
        written = await teacher.generate(prompt, sampling, deadline=soon())
        assert 0 < len(written.token_ids) <= 12
        with pytest.raises(PermanentError, match=r"teacher\.backend only writes"):
            await teacher.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=1)
    async with backend(server.url, model) as direct:
        ids = (await direct.generate(prompt, sampling, deadline=soon())).token_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(written.token_ids, skip_special_tokens=True)[:8] == text[:8]


async def test_refusals_are_one_clear_line(server: RunningServer, model: Path) -> None:
    _, prompt, _ = prompt_and_response(model)
    async with backend(server.url, model, served_model="nope") as teacher:
        with pytest.raises(PermanentError, match=r"teacher: HTTP 404: .*set teacher\.backend\.served_model"):
            await teacher.capabilities(deadline=soon())
    async with backend(server.url, model) as teacher:
        with pytest.raises(PermanentError, match="token 600 is out of the vocabulary of 512"):
            await teacher.score(ScoreRequest(prompt, np.array([600], np.int32), 1.0, soon()), top_k=1)
        with pytest.raises(PermanentError, match="top_k=41 is not one of 0 to 40"):
            await teacher.score(ScoreRequest(prompt, prompt, 1.0, soon()), top_k=41)
        with pytest.raises(PermanentError, match="scores at temperature 1 only"):
            await teacher.score(ScoreRequest(prompt, prompt, 0.5, soon()), top_k=4)
        long = np.resize(prompt, 3000).astype(np.int32)
        with pytest.raises(PermanentError, match="exceed the server's context of 2047 tokens"):
            await teacher.score(ScoreRequest(prompt, long, 1.0, soon()), top_k=1)
