"""How the vLLM backend reads replies. They were recorded from 0.32.0."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm_stand_in import (
    as_before_0_32,
    recorded,
)

from spot_async.backends.shared.bodies import run_at_once
from spot_async.backends.vllm.client import NoSuchRouteError, read_error
from spot_async.backends.vllm.replies import (
    CompletionsRoute,
    GenerateRoute,
    Table,
    read_prompt_row,
    read_table,
)
from spot_async.errors import (
    PermanentError,
    PoisonedReplyError,
)

Route = GenerateRoute | CompletionsRoute


def table_of(route: Route, reply: Any, width: int) -> Table:
    answer = route.read(msgspec.json.encode(reply))
    return run_at_once(read_table(answer.token_rows, route.read_row, width=width))


@pytest.mark.parametrize("shape", [lambda reply: reply, as_before_0_32])
def test_both_shapes_of_a_sampled_response_give_its_own_and_the_likeliest_tokens(shape: Callable[[Any], Any]) -> None:
    reply = recorded("generate")  # logprobs: 3, so the top two are complete whatever was sampled
    content = recorded("generate")["choices"][0]["logprobs"]["content"]
    tokens = np.array(reply["choices"][0]["token_ids"], np.int32)
    table = table_of(GenerateRoute(), shape(reply), width=4)
    np.testing.assert_array_equal(table.of_tokens(tokens), np.float32([entry["logprob"] for entry in content]))
    ids, logprobs = table.top(2)
    for row, entry in enumerate(content):
        best = sorted(entry["top_logprobs"], key=lambda token: -token["logprob"])[:2]
        assert ids[row].tolist() == [token["token_id"] for token in best]
        assert logprobs[row].tolist() == [np.float32(token["logprob"]) for token in best]


def test_the_openai_route_gives_the_same_numbers() -> None:
    first = table_of(GenerateRoute(), recorded("generate"), width=5)
    second = table_of(CompletionsRoute(), recorded("completions"), width=5)
    assert recorded("generate")["choices"][0]["token_ids"] == recorded("completions")["choices"][0]["token_ids"]
    np.testing.assert_array_equal(first.top(2)[0], second.top(2)[0])
    np.testing.assert_array_equal(first.top(2)[1], second.top(2)[1])


@pytest.mark.parametrize(("name", "route"), [("score", GenerateRoute()), ("score_completions", CompletionsRoute())])
def test_rows_of_given_tokens_hold_the_token_and_the_likeliest(
    name: str, route: GenerateRoute | CompletionsRoute
) -> None:
    rows = route.read(msgspec.json.encode(recorded(name))).prompt_rows
    whole = recorded("score")["prompt_logprobs"]
    table = run_at_once(read_table(rows[1:], read_prompt_row, width=3))
    tokens = np.array([6, 7, 300, 301, 17], np.int32)
    expected = [whole[i + 1][str(token)]["logprob"] for i, token in enumerate(tokens)]
    np.testing.assert_array_equal(table.of_tokens(tokens), np.float32(expected))
    by_rank = [sorted(row.items(), key=lambda item: -item[1]["logprob"])[:2] for row in whole[1:]]
    np.testing.assert_array_equal(table.top(2)[0], [[int(token) for token, _ in row] for row in by_rank])


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"7": {"logprob": -9999.0}, "8": {"logprob": -0.1}}], "-9999"),
        ([{"8": {"logprob": -0.1}, "9": {"logprob": -0.2}}], "does not hold its own token 7"),
        ([{"7": {"logprob": -0.1}}], "fewer than the 2"),
        ([{str(i): {"logprob": -1.0} for i in range(9)}], "9 log-probabilities where at most 3"),
        ([{"7": {"logprob": None}}], "Expected `float`"),
        ([None], "Expected `object`"),
    ],
)
def test_rows_that_cannot_be_true_are_refused(rows: list[Any], problem: str) -> None:
    raw = [msgspec.Raw(msgspec.json.encode(row)) for row in rows]

    def read() -> None:
        table = run_at_once(read_table(raw, read_prompt_row, width=3))
        table.of_tokens(np.array([7], np.int32))
        table.top(2)

    with pytest.raises((PoisonedReplyError, msgspec.ValidationError), match=problem):
        read()


def test_failures_that_call_for_a_flag_or_an_older_route_are_told_apart() -> None:
    assert isinstance(read_error("student", 404, b'{"detail":"Not Found"}'), NoSuchRouteError)
    assert read_error("student", 404, json.dumps(recorded("no_model")).encode()) is None
    disabled = b'{"error":{"message":"Scale-out endpoints are disabled. Restart with --enable-scale-out"}}'
    refusal = read_error("student", 403, disabled)
    assert type(refusal) is PermanentError
    assert "student.backend: the server takes no token ids: add --enable-scale-out" in str(refusal)
