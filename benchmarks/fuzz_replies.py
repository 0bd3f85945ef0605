"""Checks that adapters read damaged replies either rightly or as request errors. Anything else is a finding.

`python benchmarks/fuzz_replies.py --count 200000 --dialect vllm` damages recorded replies in their bytes and in what
they say, lets the real backend read each, and compares the result with plain readers that share no code with it:

* An exception is a `RequestError`, and carries the exchange for the dead letter.
* A value has the shapes that were asked for, finite log-probabilities of at most 0, ids of the vocabulary, rows that
  descend and name no token twice, and spans that cover the response.
* What the damage did not touch is read as before, and every number of a value is one that the reply says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from reply_cases import DIALECTS, UNUSED, VOCAB, Case, Wire, model_directory
from reply_mutations import damaged_bytes, damaged_json, damaged_msgpack
from report import show

from spot_async.base import wire
from spot_async.errors import RequestError
from spot_async.types import Generation, ScoredPositions, TokenScores

STATUSES = (301, 400, 401, 402, 403, 404, 408, 409, 413, 418, 422, 425, 429, 429, 500, 501, 502, 503, 504, 529, 599)
HEADERS: tuple[Mapping[str, str], ...] = (
    {}, {"Retry-After": "0"}, {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, {"Retry-After": "soon"},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}, {"Content-Length": "99999999"},
    {"retry-after-ms": "-1e400"},
)  # fmt: skip
ERRORS = (
    b'{"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}',
    b'{"error": {"message": "quota", "code": "insufficient_quota", "details": {"error_code": "x"}}}',
    b'{"object": "error", "message": "The request queue is full.", "code": 503}',
    b'{"error": "Unauthorized"}',
    b"<html><body><h1>502 Bad Gateway</h1></body></html>",
    wire.encode({"error": "ThrottledError", "message": "full"}),
    wire.encode({"error": "VersionMismatchError", "message": "other weights"}),
    wire.encode({"error": "SpotError", "message": "?"}),
)
STATUS_SHARE, BYTES_SHARE = 0.08, 0.42  # the other half changes what a reply says


@dataclass
class Outcome:
    """How many replies ended in which class of error or were `read`, and the findings."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


async def fuzz(dialect: str, count: int, seed: int, model: Path) -> Outcome:
    """Ask `count` times, with a damaged reply each time."""
    transport = Wire()
    cases = list(DIALECTS[dialect](transport, model))
    honest = [await _honest(case, transport) for case in cases]
    outcome = Outcome()
    for number in range(count):
        draw = random.Random(seed * 1_000_003 + number)
        place = draw.randrange(len(cases))
        problem = await _once(cases[place], honest[place], transport, draw, dialect == "local", outcome.ends)
        if problem is not None:
            outcome.findings.append(f"{dialect} {cases[place].name} #{number}: {problem}")
    return outcome


async def _honest(case: Case, transport: Wire) -> Any:
    """Return the value that the recorded reply is read as."""
    transport.status, transport.headers, transport.body = 200, {}, case.reply
    try:
        value = await case.ask()
    except RequestError as error:
        if type(error).__name__ == case.fails:
            return None
        raise
    assert case.fails is None, f"{case.name}: a reply that should be refused is not"
    if case.said is not None:
        _hold_against(value, case.said(_parsed(case.reply)))
    return value


async def _once(
    case: Case, honest: Any, transport: Wire, draw: random.Random, is_local: bool, ends: Counter[str]
) -> str | None:
    """Ask once with a damaged reply; return a finding, or None."""
    path: tuple[Any, ...] | None = None
    transport.status, transport.headers, body = 200, draw.choice(HEADERS) if draw.random() < 0.02 else {}, case.reply
    kind = draw.random()
    if kind < STATUS_SHARE:
        transport.status, transport.headers = draw.choice(STATUSES), draw.choice(HEADERS)
        body = draw.choice(ERRORS)
        body = damaged_bytes(body, draw) if draw.random() < 0.5 else body
    elif kind < STATUS_SHARE + BYTES_SHARE or case.name == "several":
        body = damaged_bytes(body, draw)
    else:
        body, path = damaged_msgpack(body, draw) if is_local else damaged_json(body, draw)
    transport.body = body
    try:
        value = await case.ask()
    except RequestError as error:
        ends[type(error).__name__] += 1
        return _of_error(error, path, honest, transport)
    except Exception as error:  # noqa: BLE001 - which exceptions there are is the question
        ends["finding"] += 1
        return f"{error!r} for {body[:300]!r}\n{''.join(traceback.format_exception(error)[-3:])}"
    ends["read"] += 1
    try:
        if transport.status != 200:
            raise AssertionError(f"status {transport.status} was taken for a reply")
        _check(value)
        if path is not None and _is_unused(path) and wire.encode(value) != wire.encode(honest):
            raise AssertionError(f"read otherwise although only {path} changed")
        parsed = _parsed(body)
        if case.said is not None and parsed is not None:
            _hold_against(value, case.said(parsed))
    except (AssertionError, LookupError, ValueError, TypeError) as problem:
        ends["finding"] += 1
        return f"{problem!r}: {value} from {body[:2000]!r}"
    return None


def _of_error(error: RequestError, path: tuple[Any, ...] | None, honest: Any, transport: Wire) -> str | None:
    if error.exchange is None:
        return f"no exchange: {error!r}"
    json.dumps(msgspec.to_builtins(error.exchange))
    if "\n" in str(error):
        return f"several lines: {error!r}"
    harmless = path is not None and _is_unused(path) and honest is not None and not transport.headers
    if not harmless or transport.status != 200 or _parsed(transport.body) is None:
        return None
    return f"refused over {path}: {error!r}"


def _is_unused(path: tuple[Any, ...]) -> bool:
    return bool(path) and path[-1] in UNUSED


def _parsed(body: bytes) -> Any:
    """Return the reply as plain values; None if it cannot be parsed as a whole, even if no one reads the bad part."""
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _check(value: Any) -> None:
    """Check what is true of every value, whatever was asked."""
    match value:
        case list():
            for each in value:
                if isinstance(each, BaseException) and not isinstance(each, RequestError):
                    raise each
                if not isinstance(each, BaseException):
                    _check(each)
        case Generation():
            tokens = value.token_ids.tolist()
            assert tokens, "empty"
            assert len(value.logprobs) == len(tokens), "rows"
            _check_numbers(value.logprobs, least=-1e4)
            _check_tokens(tokens)
            covered = [t for span in value.version_spans for t in range(span.start, span.end)]
            assert covered == list(range(len(tokens))), "spans"
            if value.topk_ids is not None:
                _check_rows(value.topk_ids, value.topk_logprobs, len(tokens))
        case TokenScores():
            known = slice(None) if value.valid is None else value.valid
            _check_numbers(value.logprobs, least=-1e4)
            _check_rows(value.topk_ids[known], value.topk_logprobs[known], len(value.topk_ids[known]))
            assert len(value.logprobs) == len(value.topk_ids) == len(value.entropy), "rows"
            assert (value.entropy_lower <= value.entropy_upper).all(), "bounds"
            assert np.isfinite(value.entropy).all(), "entropy"
            if value.tail_logprobs is not None:
                assert len(value.tail_logprobs) == len(value.logprobs), "rows"
                assert (value.tail_logprobs <= 1e-3).all(), "tails"
        case ScoredPositions():
            _check_rows(value.topk_ids, value.topk_logprobs, 1)
        case np.ndarray():
            _check_numbers(value)


def _check_numbers(values: Any, least: float = -3.5e38) -> None:  # the default is float32's least
    for each in np.asarray(values, np.float64).ravel().tolist():
        assert least <= each <= 1e-3, f"log-probability {each}"


def _check_tokens(tokens: list[int]) -> None:
    assert all(type(token) is int and 0 <= token < VOCAB for token in tokens), f"tokens {tokens}"


def _check_rows(ids: Any, logprobs: Any, rows: int) -> None:
    assert len(ids) == len(logprobs) == rows, "rows"
    for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True):
        _check_tokens(row)
        assert len(set(row)) == len(row), "a token twice"
        assert sorted(values, reverse=True) == values, "order"
        _check_numbers(values)


def _hold_against(value: Any, said: Mapping[str, Any]) -> None:
    """Check that every number of the value stands in the reply."""
    if "tokens" in said:
        assert value.token_ids.tolist() == said["tokens"], "other tokens than the reply has"
    if "logprobs" in said:
        np.testing.assert_allclose(value.logprobs, np.array(said["logprobs"], np.float64), rtol=1e-5)
    for row, values, entries in _top_rows(value, said):
        for token, logprob in zip(row, values, strict=True):
            np.testing.assert_allclose(logprob, entries[token], rtol=1e-5)


def _top_rows(value: Any, said: Mapping[str, Any]) -> Iterator[tuple[list[int], list[float], Mapping[int, float]]]:
    if "top" in said and value.topk_ids is not None:
        yield from zip(value.topk_ids.tolist(), value.topk_logprobs.tolist(), said["top"], strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialect", choices=[*DIALECTS, "all"], default="all")
    parser.add_argument("--count", type=int, default=200_000, help="replies of each dialect")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows, notes = [], []
    with model_directory() as model, np.errstate(all="ignore"):
        for dialect in DIALECTS if given.dialect == "all" else [given.dialect]:
            started = time.process_time()
            outcome = asyncio.run(fuzz(dialect, given.count, given.seed, model))
            seconds = time.process_time() - started
            ends = outcome.ends
            errors = ", ".join(f"{name} {ends[name]:,}" for name, _ in ends.most_common() if name.endswith("Error"))
            found = str(len(outcome.findings))
            rows.append([dialect, f"{given.count:,}", f"{ends['read']:,}", found, f"{seconds:.0f}"])
            notes += [f"{dialect}: {errors}", *(finding[:3000] for finding in outcome.findings[:20])]
    show("Damaged replies", ["dialect", "replies", "read", "findings", "CPU s"], rows, notes)


if __name__ == "__main__":
    main()
