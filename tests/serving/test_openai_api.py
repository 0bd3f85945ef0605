"""OpenAI's own Python client, and plain HTTP, against a running `spot-async serve`."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from served_model import KEY, ServedModel, completing
from server_on_thread import serving
from tiny_tokenizers import of_bytes

from spot_async.base import wire
from spot_async.base.seeds import derive_seed
from spot_async.serving import api
from spot_async.types import Generation, SamplingSettings

CONTEXT = 20000
PROMPT = "the other"
IDS = {"return_token_ids": True}
BY_ID = {"return_token_ids": True, "return_tokens_as_token_ids": True}


@dataclass(frozen=True)
class Server(ServedModel):
    tokenizer: Any
    reference: Any  # the module, as transformers computes it

    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """(T, V) float64; row t is of the distribution that follows token t."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([token_ids])).logits[0].double()
        return (logits / temperature).log_softmax(-1).numpy()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


# One that spreads characters over several tokens, as those of today's models do.
WORDS = ("the other one and then another, more than the others there", "ö é ü") * 3
TOKENIZER = of_bytes(*WORDS, specials=("<|end|>",))
VOCAB = len(TOKENIZER)


@pytest.fixture(scope="module")
def server(random_model: Callable[..., Path]) -> Iterator[Server]:
    model = random_model(vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    TOKENIZER.save_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with serving(model, key=KEY) as url:
        yield Server(url, model, TOKENIZER, reference)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as it:
        yield it


@pytest.fixture(scope="module")
def complete(server: Server, client: openai.OpenAI) -> Callable[..., Any]:
    return completing(server, client, PROMPT)


# -- what is answered --


def test_the_model_is_listed_under_its_directory_s_name(server: Server, client: openai.OpenAI):
    (model,) = client.models.list()
    assert model.id == server.model.name
    assert model.model_extra == {"root": str(server.model), "max_model_len": CONTEXT}


def test_a_completion_continues_its_prompt_with_the_model_s_log_probabilities(server: Server, complete):
    reply = complete(max_tokens=24, temperature=0.7, seed=5, logprobs=3, more=BY_ID)
    (choice,) = reply.choices
    prompt_ids = server.encode(PROMPT)
    assert choice.prompt_token_ids == prompt_ids
    assert server.tokenizer.decode(prompt_ids + choice.token_ids) == PROMPT + choice.text
    assert len(choice.token_ids) == 24
    assert (choice.finish_reason, choice.index) == ("length", 0)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt_ids), 24)
    assert reply.usage.total_tokens == len(prompt_ids) + 24
    expected = server.logprobs(prompt_ids + choice.token_ids, temperature=0.7)[len(prompt_ids) - 1 : -1]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    for row, token, logprob, top in zip(
        expected, choice.token_ids, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row)[:3]
        assert set(top) == {f"token_id:{each}" for each in [*best, token]}
        for name, value in top.items():
            assert value == pytest.approx(row[int(name.removeprefix("token_id:"))], abs=1e-4)


def test_numbers_are_the_engine_s_own_bit_for_bit(server: Server, complete):
    (choice,) = complete(max_tokens=16, seed=5, logprobs=0, more=BY_ID).choices
    seed = derive_seed(5, "prompt", 0, "sample", 0)
    sampling = SamplingSettings(max_tokens=16, stop_token_ids=(server.tokenizer.eos_token_id,), seed=seed)
    request = api.GenerateRequest(
        prompt_ids=np.array(server.encode(PROMPT), np.int32), sampling=sampling, timeout_s=60.0
    )
    reply = server.post(api.GENERATE, content_type=api.CONTENT_TYPE, content=wire.encode(request))
    generation = wire.decode(reply.content, Generation)
    assert choice.token_ids == generation.token_ids.tolist()
    assert choice.logprobs.token_logprobs == generation.logprobs.tolist()


def test_a_seed_repeats_a_sample_however_the_prompt_is_given(server: Server, complete):
    ids = server.encode(PROMPT)
    texts = {complete(each, seed=3, max_tokens=12).choices[0].text for each in (PROMPT, [PROMPT], ids, [ids])}
    assert len(texts) == 1
    assert complete(PROMPT, max_tokens=12, seed=4).choices[0].text not in texts
    assert complete(PROMPT, max_tokens=12).choices[0].text != complete(PROMPT, max_tokens=12).choices[0].text


def test_temperature_0_takes_the_likeliest_token_and_reports_at_1(server: Server, complete):
    (choice,) = complete(max_tokens=10, temperature=0, logprobs=0, more=BY_ID).choices
    rows = server.logprobs(server.encode(PROMPT) + choice.token_ids)[len(server.encode(PROMPT)) - 1 : -1]
    assert choice.token_ids == rows.argmax(-1).tolist()
    np.testing.assert_allclose(choice.logprobs.token_logprobs, rows.max(-1), atol=1e-4)


def test_top_p_cuts_what_is_sampled_and_not_what_is_reported(server: Server, complete):
    (choice,) = complete(max_tokens=40, top_p=0.3, seed=1, logprobs=0, more=BY_ID).choices
    rows = server.logprobs(server.encode(PROMPT) + choice.token_ids)[len(server.encode(PROMPT)) - 1 : -1]
    for row, token, logprob in zip(rows, choice.token_ids, choice.logprobs.token_logprobs, strict=True):
        likelier = np.exp(row[row > row[token]]).sum()
        assert likelier < 0.3 + 1e-5
        assert logprob == pytest.approx(row[token], abs=1e-4)


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_without_new_tokens_scores_a_prompt(server: Server, complete, as_ids: bool):
    text = "the öther one"
    ids = server.encode(text)
    reply = complete(ids if as_ids else text, max_tokens=0, echo=True, logprobs=2, more=BY_ID)
    (choice,) = reply.choices
    rows = server.logprobs(ids)
    assert choice.text == text
    assert choice.prompt_token_ids == ids
    assert (choice.token_ids, choice.finish_reason, reply.usage.completion_tokens) == ([], "length", 0)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    expected = [rows[t, token] for t, token in enumerate(ids[1:])]
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-4)
    for t, top in enumerate(choice.logprobs.top_logprobs[1:]):
        assert set(top) == {f"token_id:{each}" for each in [*np.argsort(-rows[t])[:2], ids[t + 1]]}


def test_echo_with_new_tokens_is_one_text_with_one_row_of_columns(server: Server, complete):
    (alone,) = complete(max_tokens=8, seed=2, logprobs=1).choices
    (scored,) = complete(max_tokens=0, echo=True, logprobs=1).choices
    (both,) = complete(max_tokens=8, seed=2, logprobs=1, echo=True).choices
    assert both.text == PROMPT + alone.text
    assert both.logprobs.tokens == scored.logprobs.tokens + alone.logprobs.tokens
    assert both.logprobs.token_logprobs == scored.logprobs.token_logprobs + alone.logprobs.token_logprobs
    assert both.logprobs.top_logprobs == scored.logprobs.top_logprobs + alone.logprobs.top_logprobs


def test_a_prompt_of_one_token_is_echoed_without_numbers(complete):
    (choice,) = complete([40], max_tokens=0, echo=True, logprobs=2).choices
    assert choice.logprobs.token_logprobs == [None]


def test_token_texts_make_the_text_and_key_the_top_log_probabilities(complete):
    (choice,) = complete(max_tokens=40, seed=8, logprobs=2).choices
    columns, at, whole = choice.logprobs, 0, 0
    for name, top in zip(columns.tokens, columns.top_logprobs, strict=True):
        assert name in top
        if "\ufffd" not in name:
            at = choice.text.index(name, at) + len(name)
            whole += 1
    assert whole > 10


def test_tokens_with_the_same_text_are_told_apart_by_their_ids(server: Server, complete):
    by_text = complete(max_tokens=60, seed=8, logprobs=250).choices[0].logprobs.top_logprobs
    by_id = complete(max_tokens=60, seed=8, logprobs=250, more=BY_ID).choices[0].logprobs.top_logprobs
    assert all(len(top) >= 250 for top in by_id)
    assert all(len(top) < 250 for top in by_text), "bytes that are no character have one text"


# -- what ends a response --


def until_stop_token(complete, **fields: Any) -> tuple[list[int], Any]:
    """Ids without a stop, and the reply that stops at the fifth token's id."""
    free = complete(max_tokens=12, seed=9, more=IDS).choices[0].token_ids
    more = {**IDS, "stop_token_ids": [free[4]]}
    return free, complete(max_tokens=12, seed=9, more=more, **fields)


def test_a_stop_token_ends_the_ids_and_is_not_in_the_text(server: Server, complete):
    free, reply = until_stop_token(complete, logprobs=1)
    end = free.index(free[4])
    (choice,) = reply.choices
    assert (choice.token_ids, choice.finish_reason) == (free[: end + 1], "stop")
    assert server.tokenizer.decode(server.encode(PROMPT) + free[:end]) == PROMPT + choice.text
    assert len(choice.logprobs.tokens) == reply.usage.completion_tokens == end + 1


def test_the_model_s_own_end_token_stops_unless_it_is_ignored(server: Server, complete):
    end = server.tokenizer.eos_token_id
    seeds = range(200)
    ended = next(
        choice
        for seed in seeds
        for choice in complete(max_tokens=200, seed=seed, more=IDS).choices
        if choice.finish_reason == "stop"
    )
    assert ended.token_ids[-1] == end
    assert end not in ended.token_ids[:-1]
    assert "<|end|>" not in ended.text
    (choice,) = complete(max_tokens=200, seed=0, more={**IDS, "ignore_eos": True}).choices
    assert (len(choice.token_ids), choice.finish_reason) == (200, "length")


async def test_the_async_client_asks_several_at_once(server: Server, complete):
    expected = complete(max_tokens=30, seed=6).choices[0].text
    async with server.async_client() as client:
        fields: dict[str, Any] = {"model": server.model.name, "prompt": PROMPT, "max_tokens": 30, "seed": 6}
        replies = await asyncio.gather(*(client.completions.create(**fields) for _ in range(3)))
    assert [reply.choices[0].text for reply in replies] == [expected] * 3


# -- the page --


@pytest.mark.long
def test_what_the_serving_page_shows_works(tmp_path: Path, running_server: Any):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page, flags=re.M | re.S))
    model = root / "examples" / "running_sum" / "student"
    with running_server(model) as url:
        for name, text in blocks.items():
            (tmp_path / name).write_text(text.replace("http://127.0.0.1:8000", url), encoding="utf-8")
        printed = output_of(sys.executable, tmp_path / "ask.py")
        assert output_of(sys.executable, tmp_path / "ask.py").splitlines()[:2] == printed.splitlines()[:2]
        assert "'=' " in printed
        assert re.search(r"^\[\d+(, \d+)*\] \['token_id:\d+'", printed, flags=re.M)
        if shutil.which("curl"):
            models, completion = output_of("bash", "-e", tmp_path / "ask.sh").split("}{")
            assert '"id":"student"' in models
            assert '"text_completion"' in completion


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
