"""Makes bodies for vLLM's two token routes, and reads their replies into arrays.

Pure. Large replies are read in steps (`shared/bodies.py`). Of a scored sequence only the requested rows are parsed,
and the others are skipped. Anything unexpected raises `PoisonedReplyError` or one of msgspec's errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from spot_async.errors import PoisonedReplyError
from spot_async.types import FloatArray, IntArray

from ..shared.bodies import ROWS_PER_STEP, Steps
from ..shared.held_weights import NamedSpan
from ..shared.replies import only
from ..shared.token_texts import TOKEN_ID_PREFIX

CLAMPED = -9000.0  # vLLM writes -9999 in place of -inf and NaN
NPY_HEADER = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|\x02\x00....)\{'descr': '<f4', 'fortran_order': False, "
    rb"'shape': \((?P<rows>[0-9]{1,9}), (?P<columns>[0-9]{1,9})\), \} *\n",
    re.DOTALL,
)


@dataclass(frozen=True)
class Answer:
    """One response whose rows are not parsed yet."""

    token_ids: list[int]
    finish_reason: str
    spans: Sequence[NamedSpan]  # empty from servers older than 0.27
    token_rows: Sequence[msgspec.Raw]  # of the sampled tokens; empty if not asked for
    prompt_rows: Sequence[msgspec.Raw]  # of prompt tokens, the first null; empty if not asked for
    chosen: str | None = None  # the answer to prompt_logprob_token_ids: base64 of a .npy file


Entries = tuple[Collection[int], Collection[float]]  # one row: token ids and their log-probabilities


class _TopToken(msgspec.Struct, gc=False):
    logprob: float
    token_id: int | None = None  # from 0.32 on
    token: str = ""  # before 0.32, such as "token_id:469"

    @property
    def id(self) -> int:
        return _token_id(self.token) if self.token_id is None else self.token_id


class _SampledToken(_TopToken, gc=False):
    top_logprobs: list[_TopToken] = []


class _SampledTokens(msgspec.Struct):
    content: list[msgspec.Raw]


class _GenerateChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    weight_versions: list[NamedSpan] | None = None
    logprobs: _SampledTokens | None = None


class _GenerateReply(msgspec.Struct):
    choices: list[_GenerateChoice]
    prompt_logprobs: list[msgspec.Raw] | None = None
    prompt_token_id_logprobs: str | None = None


class _CompletionTokens(msgspec.Struct):
    top_logprobs: list[msgspec.Raw]


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _CompletionTokens | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None


class _CompletionReply(msgspec.Struct):
    choices: list[_CompletionChoice]


class GenerateRoute:
    """The route with tokens in and tokens out. It makes no text, which would take most of the time of a score."""

    path = "/inference/v1/generate"

    def __init__(self) -> None:
        self._reply = msgspec.json.Decoder(_GenerateReply)
        self._row = msgspec.json.Decoder(_SampledToken)

    def body(self, model: str, token_ids: list[int], parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": model, "token_ids": token_ids, "sampling_params": {**parameters, "detokenize": False}}

    def read(self, reply: bytes) -> Answer:
        read = self._reply.decode(reply)
        choice = only(read.choices)
        return Answer(
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            spans=choice.weight_versions or (),
            token_rows=choice.logprobs.content if choice.logprobs else (),
            prompt_rows=read.prompt_logprobs or (),
            chosen=read.prompt_token_id_logprobs,
        )

    def read_row(self, row: msgspec.Raw) -> Entries:
        token = self._row.decode(row)
        entries = token.top_logprobs or [token]
        return [entry.id for entry in entries], [entry.logprob for entry in entries]


class CompletionsRoute:
    """The OpenAI route, for servers without the other one. It does not name weight versions."""

    path = "/v1/completions"

    def __init__(self) -> None:
        self._reply = msgspec.json.Decoder(_CompletionReply)
        self._row = msgspec.json.Decoder(dict[str, float])

    def body(self, model: str, token_ids: list[int], parameters: Mapping[str, Any]) -> dict[str, Any]:
        # Ask for tokens by id, because different tokens with the same text would share a key.
        as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": model, "prompt": token_ids, **as_ids, **parameters}

    def read(self, reply: bytes) -> Answer:
        choice = only(self._reply.decode(reply).choices)
        return Answer(
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            spans=(),
            token_rows=choice.logprobs.top_logprobs if choice.logprobs else (),
            prompt_rows=choice.prompt_logprobs or (),
        )

    def read_row(self, row: msgspec.Raw) -> Entries:
        entries = self._row.decode(row)
        return [_token_id(name) for name in entries], entries.values()


class _PromptEntry(msgspec.Struct, gc=False):
    logprob: float


_prompt_row = msgspec.json.Decoder(dict[int, _PromptEntry])


def read_prompt_row(row: msgspec.Raw) -> Entries:
    """Read one row of `prompt_logprobs`, which are the same on both routes."""
    entries = _prompt_row.decode(row)
    return entries.keys(), [entry.logprob for entry in entries.values()]


class Table(NamedTuple):
    """Rows of unequal length, in the server's order. Shorter rows are filled with log-probability -inf."""

    ids: IntArray  # (N, W)
    logprobs: FloatArray  # (N, W)

    def of_tokens(self, token_ids: IntArray) -> FloatArray:
        """Return the log-probability (N,) of one token per row. Raises `PoisonedReplyError` if a row lacks it."""
        found = (self.ids == token_ids[:, None]) & np.isfinite(self.logprobs)
        if not found.any(axis=1).all():
            missing = int(np.argmin(found.any(axis=1)))
            raise PoisonedReplyError(f"row {missing} does not hold its own token {int(token_ids[missing])}")
        return np.take_along_axis(self.logprobs, found.argmax(axis=1)[:, None], axis=1)[:, 0]

    def top(self, count: int) -> tuple[IntArray, FloatArray]:
        """Return the likeliest tokens and log-probabilities, each (N, count). Raises `PoisonedReplyError` for fewer."""
        order = np.argsort(-self.logprobs, axis=1, kind="stable")[:, :count]
        logprobs = np.take_along_axis(self.logprobs, order, axis=1)
        if logprobs.shape[1] < count or not np.isfinite(logprobs).all():
            raise PoisonedReplyError(f"rows with fewer than the {count} log-probabilities that were asked for")
        return np.take_along_axis(self.ids, order, axis=1), logprobs


def read_table(rows: Sequence[msgspec.Raw], read_row: Callable[[msgspec.Raw], Entries], *, width: int) -> Steps[Table]:
    """Read rows into arrays (N, width). Raises `PoisonedReplyError` for a longer row or a clamped log-probability."""
    ids: IntArray = np.zeros((len(rows), width), np.int32)
    logprobs: FloatArray = np.full((len(rows), width), -np.inf, np.float32)
    for start in range(0, len(rows), ROWS_PER_STEP):
        part = [read_row(row) for row in rows[start : start + ROWS_PER_STEP]]
        lengths = np.array([len(row_ids) for row_ids, _ in part])
        if lengths.max() > width:
            raise PoisonedReplyError(f"a row of {lengths.max()} log-probabilities where at most {width} can be")
        filled = np.arange(width) < lengths[:, None]
        place = slice(start, start + len(part))
        count = int(lengths.sum())
        ids[place][filled] = np.fromiter(chain.from_iterable(row_ids for row_ids, _ in part), np.int32, count)
        logprobs[place][filled] = np.fromiter(chain.from_iterable(values for _, values in part), np.float32, count)
        yield
    if bool(((logprobs < CLAMPED) & np.isfinite(logprobs)).any()):
        raise PoisonedReplyError("log-probabilities of -9999, which the server writes where it has no number")
    return Table(ids, logprobs)


def read_npy(content: bytes, shape: tuple[int, int]) -> FloatArray:
    """Read a .npy file, version 1 or 2, of float32 numbers in C order. numpy's own reader would trust any header."""
    header = NPY_HEADER.match(content)
    if header is None:
        raise PoisonedReplyError("numbers that are no .npy file of float32")
    if (found := (int(header["rows"]), int(header["columns"]))) != shape:
        raise PoisonedReplyError(f"numbers of shape {found} for {shape} chosen tokens")
    array: FloatArray = np.frombuffer(content, "<f4", count=shape[0] * shape[1], offset=header.end()).reshape(shape)
    return array


def _token_id(name: str) -> int:
    if not name.startswith(TOKEN_ID_PREFIX):
        raise PoisonedReplyError(f"token {name!r} is not given as an id")
    return int(name.removeprefix(TOKEN_ID_PREFIX))
