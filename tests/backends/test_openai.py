"""The `openai` backend, with recorded replies, with replies that must be refused, and with our own server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from deadlines import soon
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.openai.dialect import Dialect, largest_served, read_error, user_message
from spot_async.backends.openai.replies import (
    Completion,
    PromptRows,
    echoed_rows,
    generation,
    prompt_rows,
    retokenized,
    token_scores,
    with_chunks,
)
from spot_async.backends.openai.text_alignment import align, as_text
from spot_async.backends.shared.bodies import run_at_once
from spot_async.backends.shared.failures import FailedReply, classify
from spot_async.backends.shared.launch import free_port
from spot_async.backends.shared.token_texts import UNKNOWN, TokenTexts
from spot_async.config import PromptConfig
from spot_async.data.prompts import PromptRenderer
from spot_async.errors import Exchange, PermanentError, PoisonedReplyError, RequestError, TransientError
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import ChatTurn, SamplingSettings, ScoreRequest

DATA = Path(__file__).parents[1] / "recorded" / "openai"
VLLM = msgspec.json.decode((DATA / "vllm_0.32.0.json").read_bytes())
SGLANG = msgspec.json.decode((DATA / "sglang_0.5.23.json").read_bytes())
TOKENIZER = PreTrainedTokenizerFast(tokenizer_file=str(DATA / "tokenizer.json"), eos_token="<|im_end|>")
VOCAB = 512
TEXTS = TokenTexts(TOKENIZER, VOCAB)
PROMPT: list[int] = VLLM["ids_echo"]["request"]["prompt"]
SAMPLING = SamplingSettings(max_tokens=4, stop_token_ids=(2,), seed=3)


def choice(recorded: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(recorded["reply"]), type=Completion).only


def raw(row: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(row))


def scores_of(
    rows: PromptRows, at: Sequence[int], *, k: int = 3, top_k: int = 1, texts: TokenTexts | None = None
) -> Any:
    return run_at_once(
        token_scores(
            rows, np.array(at, np.int32), served_k=3, top_k=top_k, texts=texts, vocab_size=VOCAB, noise_nats=0.0
        )
    )


def test_both_servers_recorded_replies_say_the_same_of_a_prompt_in_every_form() -> None:
    """The recordings are of the same weights."""
    at = range(1, len(PROMPT))
    forms = {
        "prompt_logprobs": prompt_rows(choice(VLLM["ids_prompt_logprobs"]), PROMPT),
        "echo by id": echoed_rows(choice(VLLM["ids_echo"]), None, tokens=None),
        "echo and one more": echoed_rows(choice(VLLM["ids_echo_and_generate"]), None, tokens=len(PROMPT)),
    }
    expected = scores_of(forms["prompt_logprobs"], at, top_k=3)
    for rows in forms.values():
        assert list(rows.token_ids) == PROMPT
        found = scores_of(rows, at, top_k=3)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-6)
        np.testing.assert_array_equal(found.topk_ids, expected.topk_ids)
        np.testing.assert_allclose(found.entropy_upper, expected.entropy_upper, atol=1e-5)
    for recorded in (VLLM["text_echo_plain"], SGLANG["text_echo_plain"], SGLANG["ids_echo_and_generate"]):
        rows = echoed_rows(choice(recorded), TEXTS, tokens=len(PROMPT))
        known = [read for read in rows.token_ids if read != UNKNOWN]
        assert len(known) >= len(PROMPT) - 2  # é is two tokens of one byte each
        sent = as_text(np.array(PROMPT, np.int32), TEXTS)
        found = scores_of(rows, align(sent, rows.token_ids, TEXTS).same[1:], texts=TEXTS)
        assert found.valid is not None
        assert found.valid.sum() >= 4
        np.testing.assert_allclose(found.logprobs[found.valid], expected.logprobs[found.valid], atol=2e-5)
        np.testing.assert_array_equal(found.topk_ids[found.valid, 0], expected.topk_ids[found.valid, 0])


@pytest.mark.parametrize("server", [VLLM, SGLANG])
def test_what_the_server_cut_otherwise_is_known_as_a_chunk_to_those_that_ask_for_no_more(server: Any) -> None:
    rows = echoed_rows(choice(server["text_echo_plain"]), TEXTS, tokens=len(PROMPT))
    byte_ids = {content: token_id for token_id, content in enumerate(TEXTS.bytes_of) if content and len(content) == 1}
    of_each = [[byte_ids[bytes([byte])] for byte in TEXTS.bytes_of[token_id] or b""] for token_id in PROMPT[1:]]
    cut = np.array([PROMPT[0], *itertools.chain.from_iterable(of_each)], np.int32)
    aligned = align(as_text(cut, TEXTS), rows.token_ids, TEXTS)
    alone = scores_of(rows, aligned.same[1:], top_k=0, texts=TEXTS)
    scores = with_chunks(alone, aligned, rows, prompt_tokens=1)
    # Neither server names the halves of the character that follows the eighth token.
    assert (int(alone.known.sum()), int(scores.known.sum()), len(cut) - 1) == (5, 13, 26)
    said = rows.own(range(1, 9), [])
    for chunk, (sum_, own) in enumerate(zip(said, of_each, strict=False), 1):
        found = scores.logprobs[scores.chunks == chunk]
        assert found.tolist() == pytest.approx([sum_ / len(own)] * len(own), rel=1e-5)
    assert (scores.known_rows == alone.known).all()
    in_prompt = with_chunks(scores_of(rows, aligned.same[4:], top_k=0, texts=TEXTS), aligned, rows, prompt_tokens=4)
    assert in_prompt.known[:3].tolist() == [False, True, True], "the rest of a chunk that begins in the prompt is none"


def test_the_last_chunk_of_a_response_that_was_cut_off_is_unknown() -> None:
    ids = TEXTS.ids_of(["u", "s", "er"])
    letters = TEXTS.ids_of(["u", "s", "e", "r"])
    rows = PromptRows(token_ids=ids, logprobs=[None, -1.0, -2.0], rows=[raw({}), raw({"s": -1.0}), raw({"er": -2.0})])
    aligned = align(as_text(np.array(letters, np.int32), TEXTS), ids, TEXTS)
    scores = with_chunks(scores_of(rows, aligned.same[1:], top_k=0, texts=TEXTS), aligned, rows, prompt_tokens=1)
    assert scores.known.tolist() == [True, False, False]


def without_likeliest(recorded: dict[str, Any]) -> dict[str, Any]:
    """The reply as FastChat writes it: each token's own log-probability, and no other."""
    given = recorded["reply"]["choices"][0]
    logprobs = {**given["logprobs"], "top_logprobs": [{} for _ in given["logprobs"]["tokens"]]}
    return {"reply": {**recorded["reply"], "choices": [{**given, "logprobs": logprobs}]}}


@pytest.mark.parametrize(
    ("recorded", "texts", "reads_text"),
    [
        (VLLM["ids_prompt_logprobs"], None, False),
        (VLLM["ids_echo"], None, False),
        (VLLM["text_echo_plain"], TEXTS, True),
        (SGLANG["text_echo_plain"], TEXTS, True),
        (SGLANG["ids_echo_and_generate"], TEXTS, False),
        (without_likeliest(SGLANG["ids_echo_and_generate"]), TEXTS, False),
    ],
)
def test_the_less_is_asked_of_a_position_the_more_positions_are_known(
    recorded: dict[str, Any], texts: TokenTexts | None, reads_text: bool
) -> None:
    found = choice(recorded)
    if found.prompt_logprobs is not None:
        rows = prompt_rows(found, PROMPT)
    else:
        rows = echoed_rows(found, texts, tokens=len(PROMPT) if texts is not None else None)
    sent = as_text(np.array(PROMPT, np.int32), TEXTS)
    at = np.arange(len(PROMPT)) if not reads_text else align(sent, rows.token_ids, TEXTS).same
    at = at[1:]
    known = [scores_of(rows, at, top_k=top_k, texts=texts).known for top_k in range(4)]
    for fewer, more in itertools.pairwise(known):
        assert (more <= fewer).all()
    np.testing.assert_array_equal(known[0], at >= 0)  # its own log-probability is all that was asked for


@pytest.mark.parametrize("server", [VLLM, SGLANG])
@pytest.mark.parametrize("name", ["generate", "generate_stopped"])
def test_recorded_generations_carry_ids_log_probabilities_and_the_right_end(server: Any, name: str) -> None:
    recorded = server[name]
    stops = tuple(recorded["request"]["stop_token_ids"])
    reply = recorded["reply"]["choices"][0]
    found = generation("teacher", choice(recorded), msgspec.structs.replace(SAMPLING, stop_token_ids=stops), top_k=0)
    assert found.token_ids.tolist() == reply["token_ids"]
    np.testing.assert_allclose(found.logprobs, reply["logprobs"]["token_logprobs"], rtol=1e-6)
    assert found.finish_reason == reply["finish_reason"]
    assert (found.token_ids[-1] in stops) == (found.finish_reason == "stop")


def test_a_reply_with_a_hole_is_poisoned() -> None:
    base = VLLM["ids_prompt_logprobs"]

    def changed(**fields: Any) -> Any:
        return msgspec.structs.replace(choice(base), **fields)

    rows = choice(base).prompt_logprobs
    at = range(1, len(PROMPT))
    for broken, reason in [
        (changed(prompt_logprobs=rows[:-1]), "12 rows of prompt_logprobs for 13 tokens"),
        (changed(prompt_logprobs=None), "no prompt_logprobs"),
        (changed(prompt_logprobs=[*rows[:4], raw({str(PROMPT[4]): {"logprob": -9.0}}), *rows[5:]]), "fewer than 3"),
        (changed(prompt_logprobs=[*rows[:4], raw(None), *rows[5:]]), "not a number"),
    ]:
        with pytest.raises(PoisonedReplyError, match=reason):
            scores_of(prompt_rows(broken, PROMPT), at)
    with pytest.raises(PoisonedReplyError, match="2 choices where 1 was asked for"):
        choice({"reply": {"choices": 2 * base["reply"]["choices"]}})
    echo = choice(VLLM["ids_echo"])
    with pytest.raises(PoisonedReplyError, match="no log-probabilities although they were asked for"):
        echoed_rows(msgspec.structs.replace(echo, logprobs=None), None, tokens=None)
    rest = {name: getattr(echo.logprobs, name)[1:] for name in ("tokens", "token_logprobs", "top_logprobs")}
    for lists in (rest, {"token_logprobs": rest["token_logprobs"]}):  # the first token's entry left out, or its value
        shorter = msgspec.structs.replace(
            echo, prompt_token_ids=None, logprobs=msgspec.structs.replace(echo.logprobs, **lists)
        )
        with pytest.raises(PoisonedReplyError, match="differ in number"):
            echoed_rows(shorter, None, tokens=len(PROMPT))
    for value in (None, -9999.0, float("nan"), float("-inf")):
        values = [*echo.logprobs.token_logprobs[:5], value, *echo.logprobs.token_logprobs[6:]]
        broken = msgspec.structs.replace(echo, logprobs=msgspec.structs.replace(echo.logprobs, token_logprobs=values))
        with pytest.raises(PoisonedReplyError, match="not a number"):
            scores_of(echoed_rows(broken, None, tokens=None), at)


class Names:
    """Texts of a small vocabulary, some of several tokens."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def ids_of(self, texts: Sequence[str]) -> list[int]:
        return [self._names.index(text) if self._names.count(text) == 1 else UNKNOWN for text in texts]


@settings(max_examples=400)
@given(
    weights=st.lists(st.floats(0.001, 50.0), min_size=6, max_size=12, unique=True),
    names=st.lists(st.sampled_from("aabcde"), min_size=12, max_size=12),
    k=st.integers(1, 5),
    own=st.integers(0, 5),
    keeps_first=st.booleans(),
    top_k=st.integers(0, 3),
)
def test_text_keyed_rows_give_true_bounds_and_the_true_candidates_or_none(
    weights: list[float], names: list[str], k: int, own: int, keeps_first: bool, top_k: int
) -> None:
    """A server writes its K likeliest tokens and the one that was read into one dictionary, by text."""
    vocab = len(weights)
    names = [name if n % 2 else f"{name}{n}" for n, name in enumerate(names)][:vocab]
    logprobs = np.log(np.array(weights) / np.sum(weights))
    order = np.argsort(-logprobs)
    served = [*order[:k], *([own] if own not in order[:k] else [])]
    row: dict[str, float | None] = {}
    for token in served:
        if not (keeps_first and names[token] in row):
            row[names[token]] = float(logprobs[token])
    rows = PromptRows(token_ids=[0, own], logprobs=[None, float(logprobs[own])], rows=[raw(None), raw(row)])
    steps = token_scores(
        rows,
        np.array([1], np.int32),
        served_k=k,
        top_k=min(top_k, k),
        texts=Names(names),  # type: ignore[arg-type]
        vocab_size=vocab,
        noise_nats=0.0,
    )
    found = run_at_once(steps)
    entropy = -(np.exp(logprobs) * logprobs).sum()
    assert found.entropy_lower[0] <= entropy + 1e-5
    assert found.entropy_upper[0] >= entropy - 1e-5
    assert top_k or found.valid is None
    if found.valid is None:
        assert found.topk_ids[0].tolist() == order[: min(top_k, k)].tolist()
        np.testing.assert_allclose(found.topk_logprobs[0], logprobs[order[: min(top_k, k)]], atol=1e-6)
        np.testing.assert_allclose(found.logprobs[0], logprobs[own], atol=1e-6)


def test_rows_whose_names_are_all_known_are_not_masked() -> None:
    row = {"a": -0.7, "b": -1.4, "c": -3.0}
    rows = PromptRows(token_ids=[0, 2], logprobs=[None, -3.0], rows=[raw(None), raw(row)])
    names = Names(["a", "b", "c", "d", "d"])
    for k, top_k in [(2, 2), (3, 3)]:  # with the token that was read as an extra entry, and as the third best
        steps = token_scores(
            rows,
            np.array([1], np.int32),
            served_k=k,
            top_k=top_k,
            texts=names,
            vocab_size=5,
            noise_nats=0.0,  # type: ignore[arg-type]
        )
        found = run_at_once(steps)
        assert found.valid is None
        assert found.topk_ids[0].tolist() == [0, 1, 2][:top_k]


@settings(max_examples=80)
@given(limit=st.integers(1, 300), names_limit=st.booleans(), noise=st.lists(st.integers(0, 400), max_size=3))
async def test_the_largest_k_is_found_whatever_a_refusal_says(limit: int, names_limit: bool, noise: list[int]) -> None:
    asked = []

    async def refusal(k: int) -> str | None:
        asked.append(k)
        return None if k <= limit else f"logprobs={k} refused {noise} {limit if names_limit else ''}"

    assert await largest_served(256, refusal) == (min(limit, 256), limit < 256)
    assert len(asked) <= 16


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (401, '{"error":"Unauthorized"}', None, ""),  # what it takes for a key is no matter of dialect
        (429, '{"error":{"message":"slow down"}}', None, ""),
        (404, VLLM["unknown_model"]["reply"], PermanentError, r"set teacher\.backend\.served_model"),
        (400, VLLM["too_large_k"]["reply"], PermanentError, "max allowed: 64"),
        (500, "{}", None, ""),
    ],
)
def test_statuses_mean_what_may_be_done_about_them(status: int, body: Any, kind: type | None, said: str) -> None:
    content = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    error = read_error("teacher", status, content)
    if kind is None:
        assert error is None  # throttled or transient, as for every server
        return
    assert isinstance(error, kind)
    assert "\n" not in str(error)
    with pytest.raises(kind, match=said):
        raise error


def test_text_only_responses_are_tokenised_again_and_end_once() -> None:
    def tokens(text: str, reason: str, **changes: Any) -> tuple[list[int], str]:
        sampling = msgspec.structs.replace(SAMPLING, **{"max_tokens": 20, **changes})
        made = retokenized("teacher", text, reason, sampling, TOKENIZER, 2)
        assert not made.logprobs.any()
        return made.token_ids.tolist(), made.finish_reason

    ids = TOKENIZER.encode("the sum")
    assert tokens("the sum", "stop") == ([*ids, 2], "stop")
    assert tokens("the sum<|im_end|>", "stop") == ([*ids, 2], "stop")
    assert tokens("the sum", "length") == (ids, "length")
    assert tokens("the sum", "stop", max_tokens=1) == (ids[:1], "length")
    assert tokens("", "stop") == ([2], "stop")
    with pytest.raises(PoisonedReplyError, match="empty"):
        tokens("", "length")
    with pytest.raises(TransientError, match="aborted"):
        tokens("the", "abort")
    with pytest.raises(PermanentError, match="content_filter"):
        tokens("the", "content_filter")


def test_chat_only_endpoints_get_the_message_that_a_prompt_was_rendered_from_or_nothing() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DATA / "tokenizer.json"), eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    for message, thinking in [("What is é 1 + 2?", {}), ("\n{x}", {"enable_thinking": False})]:
        messages = [{"role": "user", "content": message}]
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **thinking)["input_ids"]
        assert user_message("teacher", tokenizer, np.array(chat, np.int32)) == message
    for other in (TOKENIZER.encode("no chat"), [*chat, 9], chat[1:]):
        with pytest.raises(PermanentError, match=r"teacher\.backend only chats"):
            user_message("teacher", tokenizer, np.array(other, np.int32))
    spelt = PromptRenderer(Vocabulary(tokenizer, (2,)), PromptConfig()).turn_ids(
        [ChatTurn(role="user", content="What is <|im_end|>?")]
    )
    with pytest.raises(PermanentError, match="its text spells a control token, which the endpoint may take for one"):
        user_message("teacher", tokenizer, spelt)


async def test_our_own_server_is_such_an_endpoint(
    random_model: Callable[..., Path], tmp_path: Path, servers_on_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOT_ASYNC_API_KEY", "sk-of-the-test")
    model, port = random_model(seed=4), free_port()
    prompt, response = np.array([3, 4, 5], np.int32), np.array([9, 8, 7, 30, 1], np.int32)
    local = LocalBackend(LocalBackend.Settings(port=port), role="teacher", model=str(model), run_directory=tmp_path)
    remote = OpenAIBackend(
        OpenAIBackend.Settings(url=f"http://127.0.0.1:{port}/v1", api_key_env="SPOT_ASYNC_API_KEY"),
        role="teacher",
        model=str(model),
        run_directory=tmp_path,
    )
    async with local, remote:
        found = await remote.capabilities(deadline=soon())
        expected = await local.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=16)
        scores = await remote.score(ScoreRequest(prompt, response, 1.0, soon()), top_k=16)
        sampling = SamplingSettings(max_tokens=9, stop_token_ids=(1,), seed=11)
        written, again = [await remote.generate(prompt, sampling, top_k=2, deadline=soon()) for _ in range(2)]
        read = await local.score(ScoreRequest(prompt, written.token_ids, 1.0, soon()), top_k=2)
        assert remote.traffic.requests > 4
    assert found.token_id_prompts
    assert found.sampled_token_ids
    assert 1e-6 <= found.logprob_noise_nats < 1e-3  # equal readings are no promise of equal ones
    assert (found.weight_update, found.candidate_logprobs) == (False, "none")
    assert scores.valid is None
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=2e-5)
    np.testing.assert_array_equal(scores.topk_ids, expected.topk_ids)
    assert (scores.entropy_lower <= expected.entropy + 1e-5).all()
    assert (expected.entropy - 1e-5 <= scores.entropy_upper).all()
    np.testing.assert_array_equal(written.token_ids, again.token_ids)
    np.testing.assert_allclose(written.logprobs, read.logprobs, atol=2e-5)
    np.testing.assert_array_equal(written.topk_ids, read.topk_ids)


@pytest.mark.parametrize(("lists_models", "status", "is_alive"), [
    (True, 200, True), (True, 401, True), (True, 500, False), (True, 503, False),
    (False, 500, True), (False, 502, True), (False, 503, False),
])  # fmt: skip
async def test_a_list_of_models_that_was_never_there_is_not_missed_by_a_ping(
    random_model: Callable[..., Path], tmp_path: Path, lists_models: bool, status: int, is_alive: bool
) -> None:
    settings = OpenAIBackend.Settings(url="http://h", served_model="m")
    backend = OpenAIBackend(settings, role="teacher", model=str(random_model()), run_directory=tmp_path)
    backend._found, backend._dialect = object(), Dialect(model="m", lists_models=lists_models)  # type: ignore[assignment]

    async def get(path: str, *, deadline: float) -> bytes:
        if status == 200:
            return b"{}"
        error = classify("teacher", FailedReply(status))
        error.exchange = Exchange("http://h", "GET", path, 0, None, status)
        raise error

    backend._server.endpoint = SimpleNamespace(get=get)  # type: ignore[assignment]
    if is_alive:
        await backend.ping(deadline=1.0)
    else:
        with pytest.raises(RequestError):
            await backend.ping(deadline=1.0)
