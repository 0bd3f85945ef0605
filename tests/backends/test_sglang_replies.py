"""How the SGLang backend reads replies. They were recorded from 0.5.23."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from sglang_stand_in import (
    RESPONSE,
    V0,
    V1,
    VOCAB,
    recorded,
    recorded_bytes,
)

from spot_async.backends.sglang.replies import STEP_BYTES, read_generation, read_next_token, read_scores
from spot_async.backends.shared.bodies import run_at_once
from spot_async.backends.shared.discovery import LEAST_NOISE_NATS, differences, noise_nats, temperature_convention
from spot_async.backends.shared.held_weights import WeightNames
from spot_async.errors import (
    PoisonedReplyError,
    ServerRestartedError,
    TransientError,
)
from spot_async.types import Generation, VersionSpan

NAMES = WeightNames("student", is_student=True).reader()


def test_flat_and_nested_top_k_of_a_response_are_read_alike() -> None:
    flat = run_at_once(read_generation(recorded_bytes("generate"), NAMES, top_k=3))
    nested = run_at_once(read_generation(recorded_bytes("generate nested"), NAMES, top_k=3))
    assert flat.topk_ids is not None
    assert flat.topk_logprobs is not None
    assert nested.topk_logprobs is not None
    assert (flat.topk_ids.shape, flat.topk_ids.dtype, flat.topk_logprobs.dtype) == ((6, 3), np.int32, np.float32)
    # The first position is the same distribution in both; what was sampled after it is not.
    np.testing.assert_allclose(flat.topk_logprobs[0], nested.topk_logprobs[0], atol=2e-5)
    values = np.frombuffer(
        base64.b64decode(recorded("generate")["meta_info"]["output_top_logprobs_val_flat_b64"]), "<f4"
    )
    np.testing.assert_array_equal(flat.topk_logprobs.ravel(), values)
    assert flat.token_ids.tolist() == recorded("generate")["output_ids"]
    assert flat.version_spans == (VersionSpan(0, 6, V0),)


def test_scores_drop_the_prompts_row_and_read_alike_in_both_forms() -> None:
    flat = run_at_once(read_scores(recorded_bytes("score"), NAMES, RESPONSE, vocab_size=VOCAB))
    nested = run_at_once(read_scores(recorded_bytes("score nested"), NAMES, RESPONSE, vocab_size=VOCAB))
    own = [logprob for logprob, _, _ in recorded("score")["meta_info"]["input_token_logprobs"]]
    assert own[0] is None
    np.testing.assert_array_equal(flat.logprobs, np.array(own[1:], np.float32))
    assert flat.top.ids.shape == (5, 4)
    np.testing.assert_array_equal(flat.top.ids, nested.top.ids)
    np.testing.assert_allclose(flat.top.logprobs, nested.top.logprobs, atol=2e-5)
    # The server calls the vocabulary's last token 0 in its list of what it scored, and scores it all the same.
    assert [token for _, token, _ in recorded("score")["meta_info"]["input_token_logprobs"][1:]] == [0, 88, 83, 300, 0]


def test_only_the_vocabularys_last_token_may_come_back_as_0() -> None:
    for response in ([511, 88, 83, 300, 12], [510, 88, 83, 300, 511]):
        with pytest.raises(PoisonedReplyError, match="scored tokens are not the response's"):
            run_at_once(read_scores(recorded_bytes("score"), NAMES, np.array(response, np.int32), vocab_size=VOCAB))


def test_a_students_weights_are_those_it_started_with_until_it_is_sent_some_and_then_only_those() -> None:
    names = WeightNames("student", is_student=True)
    names.start("default")
    before = names.reader()
    assert before("default") == before(None) == V0  # some servers name none
    for name in ("checkpoint-3", ""):
        with pytest.raises(ServerRestartedError, match=f"student: the server calls its weights '{name}'.*restarted"):
            before(name)
    with names.updating(V1):
        assert before("default") == V0
    assert before("0.1") == names.reader()("0.1") == V1  # a response under way has tokens of both
    for name in ("default", None):
        with pytest.raises(ServerRestartedError, match=f"{name!r}, which this run never sent"):
            names.reader()(name)
    with pytest.raises(ServerRestartedError, match=r"holds weights 0\.0 and was last given 0\.1"):
        names.reader()("0.0")
    teachers = WeightNames("teacher", is_student=False).reader()
    assert teachers("default") == teachers("7.7") == V0


def test_chosen_tokens_come_in_the_order_that_they_were_asked_for_in() -> None:
    found = run_at_once(read_next_token(recorded_bytes("candidates"), NAMES, [9, 400, 83]))
    row = recorded("candidates")["meta_info"]["output_token_ids_logprobs"][0]
    assert found.chosen is not None
    np.testing.assert_array_equal(found.chosen, np.array([logprob for logprob, _, _ in row], np.float32))
    with pytest.raises(PoisonedReplyError, match="other tokens than asked for"):
        run_at_once(read_next_token(recorded_bytes("candidates"), NAMES, [9, 83, 400]))
    top = run_at_once(read_next_token(recorded_bytes("position"), NAMES, None)).top
    assert top is not None
    assert top.ids.shape == (1, 3)


def test_a_response_that_saw_an_update_says_which_weights_sampled_each_token() -> None:
    names = WeightNames("student", is_student=True)
    sent = names.reader()
    with names.updating(V1):
        generation = run_at_once(read_generation(recorded_bytes("two versions"), sent, top_k=0))
    assert generation.version_spans == (VersionSpan(0, 4, V0), VersionSpan(4, 8, V1))


@pytest.mark.parametrize("name", ["aborted", "aborted in the queue"])
def test_an_aborted_response_is_none_however_little_the_reply_says(name: str) -> None:
    with pytest.raises(TransientError, match="the server aborted the request: Abort"):
        run_at_once(read_generation(recorded_bytes(name), NAMES, top_k=0))


def without_row(name: str) -> Callable[[Any], None]:
    return lambda meta: meta[name].pop()


def with_null(*path: Any) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        for key in path[:-1]:
            meta = meta[key]
        meta[path[-1]] = None

    return change


def shorter(name: str) -> Callable[[Any], None]:
    def change(meta: Any) -> None:
        meta[name] = base64.b64encode(base64.b64decode(meta[name])[:-4]).decode()

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generate", without_row("output_token_logprobs")),
        ("generate", with_null("output_token_logprobs", 2, 0)),
        ("generate", shorter("output_top_logprobs_val_flat_b64")),
        ("generate", with_null("output_top_logprobs_val_flat_b64")),
        ("generate", with_null("output_top_logprobs_idx_flat_b64")),
        ("generate", with_null("finish_reason")),
        ("generate nested", with_null("output_top_logprobs", 1, 1, 0)),
        ("generate nested", lambda meta: meta["output_top_logprobs"][1].pop()),
        ("score", without_row("input_token_logprobs")),
        ("score", lambda meta: meta["input_token_logprobs"].append([-1.0, 9, None])),
        ("score", lambda meta: meta["input_token_logprobs"].__setitem__(2, [-1.0, 9, None])),
        ("score nested", with_null("input_top_logprobs", 3)),
        ("score nested", with_null("input_top_logprobs", 3, 0, 0)),
    ],
)
def test_a_reply_with_something_missing_or_no_number_is_poisoned(name: str, change: Callable[[Any], None]) -> None:
    reply = recorded(name)
    change(reply["meta_info"])
    body = json.dumps(reply).encode()
    with pytest.raises((PoisonedReplyError, ValueError, TypeError)):  # the latter become the first in `RemoteServer`
        run_at_once(
            read_scores(body, NAMES, RESPONSE, vocab_size=VOCAB)
            if "score" in name
            else read_generation(body, NAMES, top_k=3)
        )


@pytest.mark.parametrize("spaces", [False, True])
def test_long_nested_rows_are_the_same_when_they_are_read_in_parts(spaces: bool) -> None:
    draw = np.random.default_rng(0)
    count, k = 2000, 8
    ids = draw.integers(1, VOCAB, (count, k)).astype(np.int32)
    logprobs = -draw.exponential(5.0, (count, k)).astype(np.float32)
    reply = recorded("score nested")
    meta = reply["meta_info"]
    meta["input_token_logprobs"] = [[None, 402, None], *([-1.5, token, None] for token in ids[:, 0].tolist())]
    rows = zip(logprobs.tolist(), ids.tolist(), strict=True)
    meta["input_top_logprobs"] = [None, *([(x, v, None) for x, v in zip(*row, strict=True)] for row in rows)]
    body = json.dumps(reply).encode() if spaces else msgspec.json.encode(reply)
    assert len(body) > 3 * STEP_BYTES
    steps = read_scores(body, NAMES, ids[:, 0], vocab_size=VOCAB)
    assert sum(1 for _ in steps) > 3  # the event loop has its turn in between
    found = run_at_once(read_scores(body, NAMES, ids[:, 0], vocab_size=VOCAB))
    np.testing.assert_array_equal(found.top.ids, ids)
    np.testing.assert_array_equal(found.top.logprobs, logprobs)


def test_noise_and_temperature_convention_follow_from_rows_asked_for_twice() -> None:
    row = np.array([-0.5, -1.5, -3.0], np.float32)
    assert temperature_convention(row, row) == "one"
    assert temperature_convention(row, 2 * row - np.float32(0.3)) == "request"
    ids = np.array([[4, 5]], np.int32)
    top = np.array([[-1.0, -2.0]], np.float32)
    generated = Generation(
        token_ids=np.array([4], np.int32), logprobs=np.array([-1.0], np.float32), finish_reason="length",
        version_spans=(), topk_ids=ids, topk_logprobs=top,
    )  # fmt: skip

    def noise(logprob: float, read_ids: Any, read: Any) -> float:
        return noise_nats(differences(generated, np.array([logprob], np.float32), read_ids, read))

    assert noise(-1.01, ids, top) == pytest.approx(0.02, abs=1e-6)
    assert noise(-1.0, ids, top - np.float32(0.1)) == pytest.approx(0.2, abs=1e-6)
    assert noise(-1.0, ids[:, ::-1], top - np.float32(0.1)) == LEAST_NOISE_NATS  # equal once is not equal for ever
