"""Reads the replies of SGLang's native API. Pure: bytes in, arrays out.

Top log-probabilities come as flat arrays in base64. Older servers, and routers that drop unknown request fields, send
nested lists. Both become the same `TopK`. Lists are long, so readers are `Steps`. All fields have defaults, because a
reply may lack some (a request that was aborted while it waited has few). A NaN is a null on the wire, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.errors import PoisonedReplyError, TransientError
from spot_async.types import FinishReason, FloatArray, Generation, IntArray, WeightVersion

from ..shared.bodies import Steps
from ..shared.held_weights import NamedSpan, ReadName, version_spans

T = TypeVar("T")

Entry = tuple[float, int, Any]  # log-probability, token, its text or null
FirstEntry = tuple[float | None, int, Any]  # the same for input tokens, of which the first has no log-probability
Rows = list[list[Entry] | None]
NO_ROWS = msgspec.Raw(b"[]")
ROWS_END = b"]],"
STEP_BYTES = 1 << 16  # bytes of nested rows that are read in one step
ARRAY_TYPES = frozenset({"float16", "float32", "float64", "int32", "int64"})


class Finish(msgspec.Struct):
    type: str = ""  # stop, length or abort
    message: str | None = None


class MetaInfo(msgspec.Struct):
    """The fields of `meta_info` that are read. A field is None if the reply lacks it."""

    finish_reason: Finish | None = None
    weight_version: str | None = None
    weight_versions: list[NamedSpan] | None = None  # from 0.5.19 on; before, one version samples a whole response
    input_token_logprobs: list[FirstEntry] | None = None
    output_token_logprobs: list[Entry] | None = None
    output_token_ids_logprobs: list[list[Entry] | None] | None = None
    input_top_logprobs: msgspec.Raw = NO_ROWS  # nested: a list of a row of entries, or null, for each position
    output_top_logprobs: msgspec.Raw = NO_ROWS
    input_top_logprobs_val_flat_b64: bytes | None = None
    input_top_logprobs_val_flat_b64_dtype: str = "float32"
    input_top_logprobs_idx_flat_b64: bytes | None = None
    input_top_logprobs_idx_flat_b64_dtype: str = "int32"
    input_top_logprobs_shape: list[int] | None = None
    output_top_logprobs_val_flat_b64: bytes | None = None
    output_top_logprobs_val_flat_b64_dtype: str = "float32"
    output_top_logprobs_idx_flat_b64: bytes | None = None
    output_top_logprobs_idx_flat_b64_dtype: str = "int32"
    output_top_logprobs_shape: list[int] | None = None


class Reply(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)


class TopK(NamedTuple):
    ids: IntArray  # (rows, K)
    logprobs: FloatArray  # (rows, K) descending


class Scores(NamedTuple):
    """The response rows of a scoring reply."""

    logprobs: FloatArray  # (T,) of the response's own tokens
    top: TopK  # T rows
    version: WeightVersion


class NextToken(NamedTuple):
    """The requested part of the distribution after a prefix."""

    top: TopK | None  # one row
    chosen: FloatArray | None  # (k,) of the requested tokens, in their order
    version: WeightVersion | None


_decoder = msgspec.json.Decoder(Reply)
_rows_decoder = msgspec.json.Decoder(Rows)


def read_generation(body: bytes, names: ReadName, *, top_k: int) -> Steps[Generation]:
    """Read a whole response. Raises `TransientError` if the server aborted it."""
    reply = _read(_decoder, body)
    meta = reply.meta_info
    entries = meta.output_token_logprobs or []
    count = len(reply.output_ids)
    _require(
        [token for _, token, _ in entries] == reply.output_ids,
        f"{len(entries)} log-probabilities do not belong to the {count} tokens",
    )
    top = (yield from _top(meta, "output")) if top_k else None
    return Generation(
        token_ids=np.array(reply.output_ids, np.int32),
        logprobs=np.array([logprob for logprob, _, _ in entries], np.float32),
        finish_reason=_finish_reason(meta),
        version_spans=version_spans(names, meta.weight_versions, count, meta.weight_version),
        topk_ids=None if top is None else top.ids,
        topk_logprobs=None if top is None else top.logprobs,
    )


def read_scores(body: bytes, names: ReadName, response_ids: IntArray, *, vocab_size: int) -> Steps[Scores]:
    """Read log-probabilities that were asked for from the last prompt token on, and drop that token's own row.

    Raises `TransientError` if the server aborted the request.
    """
    meta = _read(_decoder, body).meta_info
    _finish_reason(meta)
    entries = (meta.input_token_logprobs or [])[1:]
    scored_ids = np.array([token for _, token, _ in entries], np.int32)
    # The server takes the vocabulary's last token for one of its placeholders and names it 0. Its row is right.
    named_0 = (scored_ids == 0) & (response_ids == vocab_size - 1) if len(scored_ids) == len(response_ids) else False
    _require(
        scored_ids.shape == response_ids.shape and bool(((scored_ids == response_ids) | named_0).all()),
        f"{len(entries)} scored tokens are not the response's {len(response_ids)}",
    )
    top = yield from _top(meta, "input")
    _require(len(top.ids) >= len(response_ids), f"top-k of {len(top.ids)} of {len(response_ids)} tokens")
    rows = slice(len(top.ids) - len(response_ids), None)  # nested lists, and some flat ones, include the prompt's row
    logprobs = [float("nan") if logprob is None else logprob for logprob, _, _ in entries]
    return Scores(np.array(logprobs, np.float32), TopK(top.ids[rows], top.logprobs[rows]), names(meta.weight_version))


def read_next_token(body: bytes, names: ReadName, candidate_ids: Sequence[int] | None) -> Steps[NextToken]:
    """Read the first generated position's distribution: its top-k, or the log-probabilities of given tokens."""
    reply = _read(_decoder, body)
    meta = reply.meta_info
    _finish_reason(meta)
    version = version_spans(names, meta.weight_versions, len(reply.output_ids), meta.weight_version)[0].version
    if candidate_ids is None:
        top = yield from _top(meta, "output")
        _require(len(top.ids) == 1, f"{len(top.ids)} rows of a single position")
        return NextToken(top, None, version)
    rows = meta.output_token_ids_logprobs or []
    _require(len(rows) == 1 and rows[0] is not None, f"{len(rows)} rows of a single position")
    row = rows[0] or []
    _require([token for _, token, _ in row] == list(candidate_ids), "log-probabilities of other tokens than asked for")
    return NextToken(None, np.array([logprob for logprob, _, _ in row], np.float32), version)


def _read(decoder: msgspec.json.Decoder[T], text: bytes) -> T:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        if "got `null`" not in str(error):
            raise
        raise PoisonedReplyError(
            f"NaN or infinite log-probabilities, which the server writes as null: {error}"
        ) from None


def _finish_reason(meta: MetaInfo) -> FinishReason:
    finish = meta.finish_reason or Finish()
    if finish.type == "abort":
        raise TransientError(f"the server aborted the request: {finish.message or 'no reason given'}")
    _require(finish.type in ("stop", "length"), f"unknown finish reason {finish.type!r}")
    return "stop" if finish.type == "stop" else "length"


def _top(meta: MetaInfo, side: str) -> Steps[TopK]:
    def field(name: str) -> Any:
        return getattr(meta, f"{side}_top_logprobs{name}")

    yield
    if field("_val_flat_b64") is not None:
        shape = field("_shape")
        _require(bool(shape) and len(shape) == 2, f"top-k of shape {shape}")
        return TopK(
            _array(field("_idx_flat_b64"), field("_idx_flat_b64_dtype"), shape).astype(np.int32),
            _array(field("_val_flat_b64"), field("_val_flat_b64_dtype"), shape).astype(np.float32),
        )
    parts = []
    for text in _parts(bytes(field(""))):
        rows = [row for row in _read(_rows_decoder, text) if row is not None]
        if rows:
            parts.append(_nested(rows))
        yield
    _require(bool(parts), "no top-k although it was asked for")
    _require(len({part.ids.shape[1] for part in parts}) == 1, "rows of different lengths in the top-k")
    return TopK(np.concatenate([part.ids for part in parts]), np.concatenate([part.logprobs for part in parts]))


def _parts(text: bytes) -> Iterator[bytes]:
    """Cut a list of rows into several lists, between rows."""
    start, end = text.find(b"[") + 1, text.rfind(b"]")  # null has neither bracket, and no rows
    while (cut := text.find(ROWS_END, start + STEP_BYTES, end)) >= 0:
        yield b"[" + text[start : cut + 2] + b"]"
        start = cut + len(ROWS_END)
    yield b"[" + text[start : max(start, end)] + b"]"


def _nested(rows: Sequence[list[Entry]]) -> TopK:
    shape = len(rows), len(rows[0])
    _require(all(len(row) == shape[1] for row in rows), "rows of different lengths in the top-k")
    entries = [entry for row in rows for entry in row]
    return TopK(
        np.fromiter((entry[1] for entry in entries), np.int32, len(entries)).reshape(shape),
        np.fromiter((entry[0] for entry in entries), np.float32, len(entries)).reshape(shape),
    )


def _array(raw: bytes | None, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Decode a little-endian array in C order."""
    _require(raw is not None and dtype in ARRAY_TYPES, f"top-k in an unknown form ({dtype})")
    return np.frombuffer(raw or b"", np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PoisonedReplyError(otherwise)
