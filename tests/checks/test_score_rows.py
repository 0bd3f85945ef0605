"""`check_score_rows` on servers that score rightly, and on some that do not, each in its own way."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from spot_async.backends.openai.replies import Completion, echoed_rows, token_scores
from spot_async.backends.openai.text_alignment import align, as_text
from spot_async.backends.shared.bodies import run_at_once
from spot_async.backends.shared.token_texts import TokenTexts
from spot_async.checks.questions import Asked
from spot_async.checks.score_rows import RIGHT, RowFindings, check_score_rows, order_words, row_offset
from spot_async.testing.services import whole_scores
from spot_async.types import Float64Array, ScoreRequest, TokenScores

VOCAB = 40
RECORDED = Path(__file__).parents[1] / "recorded" / "openai"
Rows = Callable[[list[int], int], Float64Array]  # (V,) log-probabilities: of which tokens, before which position


def softmax(prefix: tuple[int, ...], *, scale: float = 2.0) -> Float64Array:
    """A distribution that the whole text before it decides."""
    logits = scale * np.random.default_rng([7, *prefix]).standard_normal(VOCAB)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def right(text: list[int], at: int) -> Float64Array:
    return softmax(tuple(text[:at]))


def moved(by: int) -> Rows:
    return lambda text, at: softmax(tuple(text[: max(0, at + by)]))


class Server:
    """Scores with the row that `rows` gives for each token; `change` spoils the scores."""

    def __init__(
        self, rows: Rows = right, change: Callable[[TokenScores], TokenScores] | None = None, noise: float = 0.0
    ) -> None:
        self.rows, self.change, self.noise = rows, change, noise
        self.draw = np.random.default_rng(1)

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        text, response_ids = request.token_ids.tolist(), request.response_ids
        rows = np.stack([self.rows(text, len(request.prompt_ids) + at) for at in range(len(response_ids))])
        rows = rows + self.noise * self.draw.uniform(-1, 1, rows.shape)
        scores = whole_scores(rows, response_ids, top_k)
        return scores if self.change is None else self.change(scores)


def asked(response_tokens: int = 12) -> Asked:
    draw = np.random.default_rng(3)
    ids = [draw.integers(3, VOCAB, 20 + response_tokens).astype(np.int32) for _ in range(3)]
    return Asked([each[:20] for each in ids], [each[20:] for each in ids], stop_token_ids=(1,))


async def found_of(server: Any, *, noise_nats: float = 0.0, top_k: int = 16, **said: Any) -> RowFindings:
    return await check_score_rows(
        server,
        said.get("asked") or asked(),
        vocab_size=VOCAB,
        top_k=top_k,
        noise_nats=noise_nats,
        special={0, 1, 2},
        run_top_k=top_k,
    )


def masked(share: float) -> Callable[[TokenScores], TokenScores]:
    def change(scores: TokenScores) -> TokenScores:
        return msgspec.structs.replace(scores, valid=np.arange(len(scores.logprobs)) % 10 >= round(10 * share))

    return change


def with_values(change: Callable[[Any], Any]) -> Callable[[TokenScores], TokenScores]:
    def changed(scores: TokenScores) -> TokenScores:
        values = {name: change(getattr(scores, name)).astype(np.float32) for name in ("logprobs", "topk_logprobs")}
        return msgspec.structs.replace(scores, **values)

    return changed


@pytest.mark.parametrize(("noise", "top_k"), [(0.0, VOCAB), (0.0, 1), (0.0, 5), (0.04, 16), (0.04, 5)])
async def test_a_server_that_scores_rightly_is_found_right(noise: float, top_k: int) -> None:
    """Also one whose numbers differ a little each time, and one that shows the likeliest token only."""
    found = await found_of(Server(noise=noise), noise_nats=2 * noise, top_k=top_k)
    assert found == RowFindings(masked=0.0, order=RIGHT)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (1, "scores are one row off: each token has the distribution after the one that predicts it"),
        (2, "scores are 2 rows off: each token has the distribution after"),
        (-1, "scores are one row off: each token has the distribution before"),
        (-2, "scores are 2 rows off: each token has the distribution before"),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.04])
async def test_rows_that_are_off_are_found_and_it_is_said_by_how_many(by: int, said: str, noise: float) -> None:
    found = await found_of(Server(moved(by), noise=noise), noise_nats=2 * noise)
    (fault,) = found.faults
    assert fault.startswith(said)
    assert "use another server" in fault


def as_in_a_template(text: list[int], at: int) -> Float64Array:
    """Where prompts end, each token is as good as certain, whatever stands directly before it."""
    if not 12 <= at < 26:
        return right(text, at)
    row = right(text, at)
    row[at] = row.max() + 12.0
    return np.asarray(row - np.log(np.exp(row).sum()))


@pytest.mark.parametrize("top_k", [1, 2, 16])
async def test_tokens_that_are_certain_anyway_do_not_make_a_right_server_wrong(top_k: int) -> None:
    assert await found_of(Server(as_in_a_template), top_k=top_k) == RowFindings(masked=0.0, order=RIGHT)


async def test_a_model_that_is_certain_everywhere_is_called_neither_right_nor_wrong() -> None:
    def certain(text: list[int], at: int) -> Float64Array:
        row = right(text, at)
        row[at] = 20.0
        return np.asarray(row - np.log(np.exp(row).sum()))

    found = await found_of(Server(certain), top_k=1)
    assert (found.order, found.faults) == (None, [])


async def test_two_servers_that_answer_in_turn_are_noise_and_not_rows_that_are_off() -> None:
    servers = cycle([Server(), Server(lambda text, at: softmax(tuple(text[:at]), scale=2.01))])

    class InTurn:
        async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
            return await next(servers).score(request, top_k=top_k)

    assert await found_of(InTurn()) == RowFindings(masked=0.0, order=RIGHT)


def only_own_late(scores: TokenScores) -> TokenScores:
    return msgspec.structs.replace(scores, logprobs=np.roll(scores.logprobs, 1))


def by_length(text: list[int], at: int) -> Float64Array:
    """A cache that knows a text by its length."""
    return softmax((at,))


def sharp(text: list[int], at: int) -> Float64Array:
    """Nearly all probability is on few tokens, as in text."""
    return softmax(tuple(text[:at]), scale=8.0)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server(by_length), "its distributions do not follow the text"),
        (Server(change=only_own_late), "a token's log-probability is not the one that its own"),
        (Server(change=with_values(np.exp)), "log-probabilities are above 0"),
        (Server(change=with_values(lambda values: values / math.log(10))), "the probabilities of a row sum to"),
        (Server(sharp, with_values(lambda values: values / math.log(2))), "the probabilities of a row sum to 0."),
        (Server(sharp, with_values(lambda values: values / 0.7)), "the probabilities of a row sum to 0."),
        (Server(change=with_values(lambda values: values * np.nan)), "log-probabilities are not numbers"),
        (Server(change=with_values(lambda values: values + np.inf)), "log-probabilities are not numbers"),
    ],
)  # fmt: skip
async def test_numbers_that_are_no_log_probabilities_of_the_text_are_refused(server: Server, said: str) -> None:
    (fault,) = (await found_of(server)).faults
    assert fault.startswith(said)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda text, at: softmax(()), "its distribution is the same at every position"),
        (lambda text, at: np.full(VOCAB, -math.log(VOCAB)), "its distributions are uniform: no token"),
        (lambda text, at: softmax(tuple(text[:at]), scale=0.02), "its distributions are uniform: no token"),
    ],
)
async def test_a_model_that_says_the_same_of_every_text_is_named(rows: Rows, said: str) -> None:
    found = await found_of(Server(rows))
    assert found.alike is not None
    assert found.alike.startswith(said)


async def test_rounded_numbers_are_a_note_with_what_to_set() -> None:
    found = await found_of(Server(change=with_values(lambda values: np.round(values, 2))))
    assert (found.order, found.faults) == (RIGHT, [])
    assert found.notes == ["log-probabilities are rounded to 2 decimals: set logprob_noise_nats to 0.005 or more"]


async def test_masked_positions_are_counted_in_responses_and_rows_between_them_still_checked() -> None:
    found = await found_of(Server(change=masked(0.3)))
    assert found.masked == pytest.approx(0.3, abs=0.1)
    assert found.order == RIGHT
    off = await found_of(Server(moved(1), masked(0.6)))
    assert off.masked == pytest.approx(0.6, abs=0.1)
    assert off.faults[0].startswith("scores are one row off")


async def test_a_server_that_knows_no_row_is_not_called_right() -> None:
    assert await found_of(Server(change=masked(1.0))) == RowFindings(masked=1.0, order=None)


async def test_a_server_whose_noise_hides_all_changes_is_called_neither_right_nor_wrong() -> None:
    flat = Server(lambda text, at: softmax(tuple(text[:at]), scale=0.2), noise=0.4)
    found = await found_of(flat, noise_nats=0.8)
    assert (found.order, found.faults) == (None, [])


async def test_an_answer_of_no_tokens_leaves_no_share() -> None:
    found = await found_of(Server(), asked=asked(response_tokens=0))
    assert (found.masked, found.order) == (None, RIGHT)


def recorded_scores(name: str) -> TokenScores:
    """Return the scores of a recorded reply of llama-cpp-python 0.3.36, read as the backend reads them."""
    exchange = msgspec.json.decode((RECORDED / "llama_cpp_python_0.3.36.json").read_bytes())[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(RECORDED / "tokenizer.json"), eos_token="<|im_end|>")
    texts = TokenTexts(tokenizer, 512)
    reply = msgspec.json.decode(msgspec.json.encode(exchange["reply"]), type=Completion)
    ids = np.array(tokenizer.encode(exchange["request"]["prompt"]), np.int32)
    rows = echoed_rows(reply.only, texts, tokens=len(ids))
    at = align(as_text(ids, texts), rows.token_ids, texts).same[1:]
    return run_at_once(token_scores(rows, at, served_k=8, top_k=1, texts=texts, vocab_size=512, noise_nats=0.0))


@pytest.mark.parametrize(("changed", "at"), [("text_echo_5th_token", 4), ("text_echo_10th_token", 9)])
def test_recorded_scores_of_llama_cpp_python_are_one_row_off(changed: str, at: int) -> None:
    """Two texts that differ in one token. The server gives no row for the first."""
    offset = row_offset(recorded_scores("text_echo"), recorded_scores(changed), at, 0.0)
    assert offset == -1
    assert order_words(offset) == (
        "scores are one row off: each token has the distribution after the one that predicts it"
    )
