"""Reads the replies of OpenAI-compatible servers into arrays. Pure: it sends nothing.

Servers differ in how they give a prompt's log-probabilities (echoed tokens, or vLLM's `prompt_logprobs`), and in how
they name tokens (by id, or by text). Here both become rows: one for each token that the server read, with its own
log-probability and those of the most likely tokens. `openai_discovery.py` finds out which server does what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.errors import PermanentError, PoisonedReplyError, TransientError
from spot_async.models.entropy import entropy_bounds, plogp
from spot_async.types import (
    BoolArray,
    Float64Array,
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    TokenScores,
    VersionSpan,
    WeightVersion,
)

from ..shared.bodies import ROWS_PER_STEP, Steps
from ..shared.replies import ABORTED, only
from ..shared.token_texts import TOKEN_ID_PREFIX, UNKNOWN, TokenTexts
from .text_alignment import Alignment

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

FLOOR_NATS = -9999.0  # what vLLM writes for minus infinity and for NaN


class Logprobs(msgspec.Struct):
    """Log-probabilities of a completion: of the echoed prompt's tokens, if asked for, then of generated tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[msgspec.Raw] | None = None


class PromptLogprob(msgspec.Struct):
    logprob: float | None


class Choice(msgspec.Struct):
    text: str | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # the generated tokens, from vLLM and SGLang
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None  # from vLLM


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class Completion(msgspec.Struct):
    """Reply of /v1/completions."""

    choices: list[Choice]
    usage: Usage | None = None

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.prompt_tokens if self.usage is not None else None

    @property
    def only(self) -> Choice:
        return only(self.choices)


class ChatMessage(msgspec.Struct):
    content: str | None = None


class ChatChoice(msgspec.Struct):
    message: ChatMessage
    finish_reason: str | None = None


class ChatReply(msgspec.Struct):
    """Reply of /v1/chat/completions."""

    choices: list[ChatChoice]

    @property
    def only(self) -> ChatChoice:
        return only(self.choices)


Row = Mapping[str, float | None]  # the top of one distribution: log-probabilities by the server's name of each token
_echoed_row = msgspec.json.Decoder(dict[str, float | None] | None)
_prompt_row = msgspec.json.Decoder(dict[str, PromptLogprob] | None)


def read_echoed_row(row: msgspec.Raw) -> Row:
    return _echoed_row.decode(row) or {}


def read_prompt_row(row: msgspec.Raw) -> Row:
    return {key: entry.logprob for key, entry in (_prompt_row.decode(row) or {}).items()}


@dataclass(frozen=True)
class PromptRows:
    """What a server said about each of M tokens. Only the rows of response tokens are decoded, when they are needed."""

    token_ids: Sequence[int]  # (M,) `UNKNOWN` where it is not certain which token it is
    logprobs: Sequence[float | None] | None  # (M,) None if each row has its token's own, by id
    rows: Sequence[msgspec.Raw]  # (M,) the first is empty
    read_row: Callable[[msgspec.Raw], Row] = read_echoed_row

    def own(self, chosen: Sequence[int], read: Sequence[Row]) -> Float64Array:
        """Return the log-probabilities (N,) of the chosen tokens. `read` are their decoded rows."""
        if self.logprobs is not None:
            return numbers([self.logprobs[at] for at in chosen])
        return numbers([row.get(str(self.token_ids[at])) for at, row in zip(chosen, read, strict=True)])


def echoed_rows(choice: Choice, texts: TokenTexts | None, *, tokens: int | None) -> PromptRows:
    """Return the prompt's rows in the reply to a request with `echo`.

    `tokens` is the prompt's length, given if a generated token may follow it. `texts` is None if tokens are named by
    id.
    """
    logprobs = choice.logprobs
    if logprobs is None or logprobs.top_logprobs is None:
        raise PoisonedReplyError("no log-probabilities although they were asked for")
    ids = choice.prompt_token_ids
    if ids is None:
        ids = texts.ids_of(logprobs.tokens) if texts is not None else [token_id_of(each) for each in logprobs.tokens]
    count = len(ids) if tokens is None else tokens
    if not count <= len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs):
        raise PoisonedReplyError("tokens and log-probabilities differ in number")
    return PromptRows(
        token_ids=ids[:count],
        logprobs=logprobs.token_logprobs[:count],
        rows=logprobs.top_logprobs[:count],
    )


def prompt_rows(choice: Choice, token_ids: Sequence[int] | None) -> PromptRows:
    """Return the prompt's rows from `prompt_logprobs`. `token_ids` are those sent; None if text was sent."""
    rows = choice.prompt_logprobs
    ids = choice.prompt_token_ids or token_ids
    if rows is None or ids is None:
        raise PoisonedReplyError("no prompt_logprobs although they were asked for")
    if len(rows) != len(ids):
        raise PoisonedReplyError(f"{len(rows)} rows of prompt_logprobs for {len(ids)} tokens")
    return PromptRows(token_ids=ids, logprobs=None, rows=rows, read_row=read_prompt_row)


def token_scores(
    rows: PromptRows,
    at: IntArray,
    *,
    served_k: int,
    top_k: int,
    texts: TokenTexts | None,
    vocab_size: int,
    noise_nats: float,
) -> Steps[TokenScores]:
    """Return the scores of T response tokens. `at` (T,) is the row of each, -1 where the server has none.

    Tokens without a row are masked, and so are rows in which one of the `top_k` best tokens is not known. Entropy
    bounds need only numbers, not names. They follow from everything served, and are those of the served rows.
    """
    positions = np.flatnonzero(at >= 0)
    chosen = at[positions].tolist()
    own = np.zeros(len(chosen))  # (N,)
    ids: IntArray = np.full((len(chosen), served_k + 1), UNKNOWN, dtype=np.int32)
    values = np.full(ids.shape, -np.inf)
    for start in range(0, len(chosen), ROWS_PER_STEP):
        here = slice(start, start + ROWS_PER_STEP)
        read = [rows.read_row(rows.rows[row]) for row in chosen[here]]
        own[here] = rows.own(chosen[here], read)
        ids[here], values[here] = _top(read, texts, width=served_k + 1)
        yield
    if texts is not None:
        shown, lost = _without_extra(ids, values, own, served_k)
    else:
        shown, lost = values[:, :served_k], np.zeros(len(chosen), dtype=np.bool_)
        if not np.isfinite(shown).all():
            raise PoisonedReplyError(f"fewer than {served_k} log-probabilities at a position")
    lower, upper = (np.clip(each, 0.0, math.log(vocab_size)) for each in served_entropy_bounds(shown, lost, vocab_size))
    # A lost entry has at most the missing mass. If that is below the last candidate's, it cannot be a candidate.
    missing = 1.0 - np.exp(shown).sum(axis=-1)
    last = np.exp(shown[:, :top_k]).min(axis=-1, initial=np.inf)
    complete = ~lost | (missing * math.exp(2 * noise_nats) < last)
    known = complete & (ids[:, :top_k] != UNKNOWN).all(axis=1)
    bottom, top = lower[known].astype(np.float32), upper[known].astype(np.float32)
    found = TokenScores(
        logprobs=own[known].astype(np.float32),
        topk_ids=ids[known, :top_k],
        topk_logprobs=values[known, :top_k].astype(np.float32),
        entropy=(bottom + top) / np.float32(2),
        entropy_lower=bottom,
        entropy_upper=top,
        version=WeightVersion(0, 0),
    )
    return _scattered(found, positions[known], len(at), vocab_size)


def with_chunks(scores: TokenScores, aligned: Alignment, rows: PromptRows, prompt_tokens: int) -> TokenScores:
    """Return scores that also know the response's tokens which the server cut otherwise: their sums, in even parts.

    The last chunk is none of them: had the response gone on, the server might have cut it otherwise again.
    """
    last = aligned.ours.max(initial=-1)
    is_left_out = np.isin(aligned.ours, [*aligned.ours[:prompt_tokens], last]) & (aligned.same < 0)
    chunks = np.where(is_left_out, -1, aligned.ours)[prompt_tokens:].astype(np.int32)
    known = chunks >= 0
    if (known == scores.known).all():
        return scores
    chosen: list[int] = np.flatnonzero(np.isin(aligned.theirs, chunks[known])).tolist()
    sums = np.bincount(aligned.theirs[chosen], rows.own(chosen, [rows.read_row(rows.rows[at]) for at in chosen]))
    even = sums[chunks[known]] / np.bincount(chunks[known])[chunks[known]]
    logprobs = np.zeros(len(chunks), np.float32)
    logprobs[known] = even
    return msgspec.structs.replace(scores, logprobs=logprobs, valid=known, chunks=chunks, rows=scores.known)


def served_entropy_bounds(shown: Float64Array, lost: BoolArray, vocab_size: int) -> tuple[Float64Array, Float64Array]:
    """Return entropy bounds (N,), in nats, from served log-probabilities (N, K), descending and padded with -inf.

    A row that is not `lost` has the K most likely tokens. A `lost` row lacks some of those, so an unseen token may be
    likelier than a shown one. Its entropy is smallest if all the missing mass is on one token, and largest if the mass
    is spread evenly.
    """
    lower, upper = np.zeros(len(shown)), np.zeros(len(shown))
    whole = ~lost
    if whole.any():
        lower[whole], upper[whole] = entropy_bounds(shown[whole], vocab_size)
    probabilities = np.exp(shown[lost])
    unseen = vocab_size - np.isfinite(shown[lost]).sum(axis=-1)
    missing = np.clip(1.0 - probabilities.sum(axis=-1), 0.0, 1.0)
    entropy = -plogp(probabilities).sum(axis=-1) - plogp(missing)
    lower[lost] = entropy
    upper[lost] = entropy + missing * np.log(np.maximum(unseen, 1))
    return lower, upper


def _without_extra(
    ids: IntArray, values: Float64Array, own: Float64Array, served_k: int
) -> tuple[Float64Array, BoolArray]:
    """Return the part of text-keyed rows (N, W) that is surely among the K most likely, and which rows lack some.

    Tokens with the same text share an entry, so a row with such a text may have fewer than K. A server also adds the
    token that it read, if that is not among the K. Fewer than K + 1 entries do not tell whether it was added.
    """
    count = np.isfinite(values).sum(axis=-1)
    shown = values[:, :served_k].copy()
    merged = ((ids == UNKNOWN) & np.isfinite(values)).any(axis=-1)  # tokens may share an entry
    last = np.take_along_axis(values, np.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    added = merged & (count <= served_k) & (own <= last)  # the last entry may be the added token, so do not count it
    shown[np.flatnonzero(added), count[added] - 1] = -np.inf
    return shown, added | (count < served_k)


def _top(entries: Sequence[Row], texts: TokenTexts | None, *, width: int) -> tuple[IntArray, Float64Array]:
    """Return ids and log-probabilities (N, width), descending, padded with -inf."""
    counts = np.array([len(each) for each in entries], dtype=np.int64)
    if counts.max(initial=0) > width:
        raise PoisonedReplyError(f"{counts.max()} log-probabilities at a position where at most {width} can be")
    keys = [key for each in entries for key in each]
    flat_values = numbers([value for each in entries for value in each.values()])
    ids = np.full((len(entries), width), UNKNOWN, dtype=np.int32)
    values = np.full((len(entries), width), -np.inf)
    filled = np.arange(width) < counts[:, None]
    ids[filled] = texts.ids_of(keys) if texts is not None else [token_id_of(key) for key in keys]
    values[filled] = flat_values
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def token_id_of(key: str) -> int:
    """Return the id of a token named by id, with vLLM's prefix or without. Raises ValueError for other names."""
    token_id = int(key.removeprefix(TOKEN_ID_PREFIX))
    if token_id < 0:  # it would be taken for `UNKNOWN`
        raise ValueError(f"token id {token_id}")
    return token_id


def numbers(values: Sequence[float | None]) -> Float64Array:
    """Return log-probabilities as an array. Refuses null and impossible numbers, written for NaN and infinities."""
    try:
        numbers = np.array(values, dtype=np.float64)
    except TypeError:
        numbers = np.array([np.nan])
    if not (np.isfinite(numbers) & (numbers > FLOOR_NATS)).all():
        raise PoisonedReplyError("a log-probability is not a number")
    return numbers


def _scattered(known: TokenScores, positions: npt.NDArray[Any], count: int, vocab_size: int) -> TokenScores:
    """Put known rows at their positions, and placeholders elsewhere, whose entropy bounds are as wide as possible."""

    def spread(values: npt.NDArray[Any], fill: float = 0.0) -> npt.NDArray[Any]:
        whole = np.full((count, *values.shape[1:]), fill, dtype=values.dtype)
        whole[positions] = values
        return whole

    valid = np.zeros(count, dtype=np.bool_)
    valid[positions] = True
    widest = math.log(vocab_size)
    return TokenScores(
        logprobs=spread(known.logprobs),
        topk_ids=spread(known.topk_ids),
        topk_logprobs=spread(known.topk_logprobs),
        entropy=spread(known.entropy, widest / 2),
        entropy_lower=spread(known.entropy_lower),
        entropy_upper=spread(known.entropy_upper, widest),
        version=known.version,
        valid=None if valid.all() else valid,
    )


def generation(role: str, choice: Choice, sampling: SamplingSettings, *, top_k: int) -> Generation:
    """Read the response of a server that says which token ids it sampled.

    Raises `PoisonedReplyError`, or `TransientError` for a response that was aborted.
    """
    check_finished(role, choice.finish_reason)
    logprobs = choice.logprobs
    if logprobs is None:
        raise PoisonedReplyError("no log-probabilities although they were asked for")
    ids = choice.token_ids if choice.token_ids is not None else [token_id_of(each) for each in logprobs.tokens]
    if not len(ids) == len(logprobs.token_logprobs):
        raise PoisonedReplyError(f"{len(logprobs.token_logprobs)} log-probabilities of {len(ids)} tokens")
    count = len(ids)
    ended = bool(ids) and ids[-1] in sampling.stop_token_ids
    topk_ids: IntArray | None = None
    topk_logprobs: FloatArray | None = None
    if top_k:
        found, values = _top([read_echoed_row(row) for row in logprobs.top_logprobs or []], None, width=top_k + 1)
        topk_ids, topk_logprobs = found[:, :top_k], values[:, :top_k].astype(np.float32)
    return Generation(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=numbers(logprobs.token_logprobs).astype(np.float32),
        finish_reason="length" if choice.finish_reason == "length" and not ended else "stop",
        version_spans=(VersionSpan(0, count, WeightVersion(0, 0)),),
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
    )


def retokenized(
    role: str,
    text: str,
    finish_reason: str | None,
    sampling: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    end_token_id: int,
) -> Generation:
    """Make a response of a text, from a server that gives only text.

    We tokenise it, so no log-probability is known, and all are 0. Good for evaluation and cross-entropy (KD);
    `Capabilities.sampled_token_ids` is False for such a server.
    """
    check_finished(role, finish_reason)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    ended = finish_reason != "length"
    if ended and not (ids and ids[-1] in sampling.stop_token_ids):
        ids.append(end_token_id)
    ends = [n for n, token_id in enumerate(ids, start=1) if token_id in sampling.stop_token_ids]
    ids = ids[: min([sampling.max_tokens, *ends[:1]])]
    if not ids:
        raise PoisonedReplyError("the response is empty although it was cut off")
    return Generation(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop" if ids[-1] in sampling.stop_token_ids else "length",
        version_spans=(VersionSpan(0, len(ids), WeightVersion(0, 0)),),
    )


def check_finished(role: str, finish_reason: str | None) -> None:
    """Raise unless the response is whole, or used up its tokens."""
    check_not_aborted(role, finish_reason)
    if finish_reason not in ("stop", "length", "eos", "eos_token"):
        raise PermanentError(f"{role}: the server ended the response for another reason: {finish_reason!r}")


def check_not_aborted(role: str, finish_reason: str | None) -> None:
    """Raise `TransientError` if the server aborted the request, since the reply is then not complete."""
    if finish_reason in ABORTED:
        raise TransientError(f"{role}: the server aborted the request (finish reason {finish_reason!r})")
