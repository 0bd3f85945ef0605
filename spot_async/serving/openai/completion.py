"""Translates a completion request into requests to the engine, and the engine's arrays into its choices.

There are no sockets and no engine here. Prompts become token ids, each choice a `GenerateRequest`, and each echoed
prompt a `ScoreRequest`. Tokens and log-probabilities become text, columns and finish reasons.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec import UNSET

from spot_async.base.seeds import derive_seed
from spot_async.serving.api import GenerateRequest, ScoreRequest
from spot_async.serving.engine.requests import Tokens
from spot_async.serving.openai.api import LOWEST_LOGPROB, ApiError, Choice, CompletionRequest, Logprobs
from spot_async.serving.openai.detokenizer import CONTEXT_TOKENS, IncrementalText, StopStrings, TokenTexts, decoder
from spot_async.types import FinishReason, FloatArray, IntArray, SamplingSettings, TokenScores

# Below this the likeliest token is taken, as at 0: such a number means "almost 0", and float32 must divide by it.
GREEDY_TEMPERATURE = 1e-4
MAX_REPLY_LOGPROBS = 1 << 22  # each takes 100 bytes while a reply is written


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What `/v1` knows about the model."""

    name: str
    directory: str
    max_context_tokens: int
    max_logprobs: int
    end_token_ids: tuple[int, ...]
    tokenizer: Any
    token_texts: TokenTexts


@dataclasses.dataclass(frozen=True)
class Prompt:
    token_ids: IntArray  # (P,)
    text: str  # empty unless it is echoed
    offsets: list[int]  # where each token begins in the text


class Plan:
    """One request, checked and ready for the engine. `prompts` are its prompts as `read_prompt` returned them.

    Raises `ApiError`.
    """

    def __init__(self, asked: CompletionRequest, prompts: Sequence[Prompt], model: ServedModel) -> None:
        self.asked = asked
        self.prompts = prompts
        self._model = model
        self._seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self._greedy = asked.temperature is not None and asked.temperature < GREEDY_TEMPERATURE
        ends = () if asked.ignore_eos else model.end_token_ids
        self._stop_token_ids = tuple(dict.fromkeys([*ends, *(asked.stop_token_ids or ())]))
        self._check_reply()

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.asked.samples

    @property
    def temperature(self) -> float:
        """The temperature of reported log-probabilities. With greedy sampling it is 1."""
        return 1.0 if self._greedy or self.asked.temperature is None else self.asked.temperature

    def generation(self, index: int) -> GenerateRequest:
        """Return the engine's request for choice `index`. Its seed depends only on its place in the request."""
        number, sample = divmod(index, self.asked.samples)
        sampling = SamplingSettings(
            temperature=0.0 if self._greedy else self.temperature,
            top_p=self.asked.top_p or 1.0,
            max_tokens=self.asked.token_budget,
            stop_token_ids=self._stop_token_ids,
            seed=derive_seed(self._seed, "prompt", number, "sample", sample),
        )
        top_k = self.asked.logprobs or 0
        return GenerateRequest(
            prompt_ids=self.prompts[number].token_ids, sampling=sampling, top_k=top_k, timeout_s=math.inf
        )

    def scoring(self, prompt: Prompt) -> ScoreRequest | None:
        """Return the engine's request to score a prompt's tokens after the first; None if that is not needed."""
        if not self.asked.echo or self.asked.logprobs is None or len(prompt.token_ids) < 2:
            return None
        return ScoreRequest(
            prompt_ids=prompt.token_ids[:1],
            response_ids=prompt.token_ids[1:],
            top_k=self.asked.logprobs,
            temperature=self.temperature,
            timeout_s=math.inf,
        )

    def requests(self) -> Iterable[GenerateRequest | ScoreRequest]:
        """Yield the engine's requests. Of a prompt's samples, which differ only in their seeds, only the first."""
        if self.asked.token_budget:
            yield from map(self.generation, range(0, self.choices, self.asked.samples))
        yield from filter(None, map(self.scoring, self.prompts))

    def writer(self, index: int) -> ChoiceWriter:
        return ChoiceWriter(index, self.prompts[index // self.asked.samples], self.asked, self._model)

    def _check_reply(self) -> None:
        """Refuse a reply that would take too much memory on either side, or too long to write."""
        echoed = sum(len(prompt.token_ids) for prompt in self.prompts) if self.asked.echo else 0
        tokens = self.asked.samples * (echoed + len(self.prompts) * self.asked.token_budget)
        numbers = tokens * (self.asked.logprobs or 0)
        if numbers > MAX_REPLY_LOGPROBS:
            message = (
                f"logprobs={self.asked.logprobs}: of up to {tokens:,} tokens that makes a reply of {numbers:,} "
                f"numbers; at most {MAX_REPLY_LOGPROBS:,} are served: ask for fewer, or for fewer choices at a time"
            )
            raise ApiError(400, message, param="logprobs")


class ChoiceWriter:
    """Writes one choice, part by part. Call `echo` first if the prompt is wanted, then `push` as tokens come."""

    def __init__(self, index: int, prompt: Prompt, asked: CompletionRequest, model: ServedModel) -> None:
        self.stopped = False  # by a stop string; later tokens must be dropped
        self.tokens = 0
        self._index = index
        self._prompt = prompt
        self._asked = asked
        self._texts = model.token_texts
        skip = asked.skip_special_tokens is not False
        decode = decoder(model.tokenizer, skip_special_tokens=skip)
        self._text = IncrementalText(decode, prompt.token_ids[-CONTEXT_TOKENS:].tolist())
        self._stop = StopStrings(asked.stop_strings)
        self._offset = len(prompt.text)
        self._first = True

    def echo(self, scores: TokenScores | None) -> Choice:
        """Return the prompt's part. `scores` are of its tokens after the first."""
        logprobs = None
        if self._asked.logprobs is not None:
            first, *rest = self._prompt.token_ids.tolist()
            logprobs = Logprobs(tokens=[self._name(first)], token_logprobs=[None], top_logprobs=[None], text_offset=[0])
            if scores is not None:
                scored = Tokens(np.array(rest, np.int32), scores.logprobs, scores.topk_ids, scores.topk_logprobs)
                logprobs = _joined_logprobs([logprobs, self._logprobs(scored, self._prompt.offsets[1:])])
        finished: FinishReason | None = None if self._asked.token_budget else "length"
        return self._choice(self._prompt.text, logprobs, [], finished)

    def push(self, sampled: Tokens, finish_reason: FinishReason | None) -> Choice:
        """Return the part that these tokens add, with the last one's `finish_reason`. An end token adds no text."""
        token_ids: list[int] = sampled.token_ids.tolist()
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        if self._asked.logprobs is None and not self._asked.stop_strings:
            offsets: list[int] = []
            text = self._text.push(shown)
        else:
            text, offsets = self._push_each(shown)
            if self.stopped:
                token_ids, finish_reason = token_ids[: len(offsets)], "stop"
        if finish_reason is not None and not self.stopped:
            rest = self._text.flush()
            self._offset += len(rest)
            text += self._stop.push(rest)
            self.stopped = self._stop.found
            finish_reason = "stop" if self.stopped else finish_reason
            text += self._stop.flush()
        self.tokens += len(token_ids)
        logprobs = None
        if self._asked.logprobs is not None:
            offsets += [self._offset] * (len(token_ids) - len(offsets))
            logprobs = self._logprobs(sampled.part(slice(len(token_ids))), offsets)
        return self._choice(text, logprobs, token_ids, finish_reason)

    def _push_each(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text to show and where each token begins, up to the token that completes a stop string."""
        text = ""
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._offset)
            piece = self._text.push([token_id])
            self._offset += len(piece)
            text += self._stop.push(piece)
            self.stopped = self._stop.found
            if self.stopped:
                break
        return text, offsets

    def _choice(
        self, text: str, logprobs: Logprobs | None, token_ids: list[int], finish_reason: FinishReason | None
    ) -> Choice:
        ids = self._asked.return_token_ids
        first, self._first = self._first, False
        return Choice(
            index=self._index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=token_ids if ids else UNSET,
            prompt_token_ids=self._prompt.token_ids.tolist() if ids and first else UNSET,
        )

    def _logprobs(self, tokens: Tokens, offsets: list[int]) -> Logprobs:
        names = [self._name(token_id) for token_id in tokens.token_ids.tolist()]
        values = _finite(tokens.logprobs)
        top: list[dict[str, float] | None] = []
        for row, (name, value) in enumerate(zip(names, values, strict=True)):
            best: dict[str, float] = {}
            if tokens.topk_ids is not None and tokens.topk_logprobs is not None:
                for token_id, logprob in zip(
                    tokens.topk_ids[row].tolist(), _finite(tokens.topk_logprobs[row]), strict=True
                ):
                    best.setdefault(self._name(token_id), logprob)  # the likeliest of tokens with the same text
            best.setdefault(name, value)
            top.append(best)
        return Logprobs(tokens=names, token_logprobs=[*values], top_logprobs=top, text_offset=offsets)

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._asked.return_tokens_as_token_ids else self._texts[token_id]


def joined(parts: Sequence[Choice]) -> Choice:
    """Join the parts of a choice, given in order, into a whole."""
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    token_ids = [part.token_ids for part in parts if part.token_ids is not UNSET]
    return Choice(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
        finish_reason=parts[-1].finish_reason,
        token_ids=[token_id for ids in token_ids for token_id in ids] if token_ids else UNSET,
        prompt_token_ids=parts[0].prompt_token_ids,
    )


def _joined_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        tokens=[value for part in parts for value in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[value for part in parts for value in part.top_logprobs],
        text_offset=[value for part in parts for value in part.text_offset],
    )


def _finite(logprobs: FloatArray) -> list[float]:
    values: list[float] = np.maximum(logprobs, np.float32(LOWEST_LOGPROB)).tolist()
    return values


def check_served(asked: CompletionRequest, model: ServedModel) -> None:
    """Raise `ApiError` for whatever can be refused before a prompt is read."""
    if asked.model not in (None, model.name):
        message = f"the model `{asked.model}` does not exist; this server has `{model.name}`"
        raise ApiError(404, message, param="model", code="model_not_found")
    if asked.logprobs is not None and asked.logprobs > model.max_logprobs:
        message = f"logprobs={asked.logprobs}: at most {model.max_logprobs} are served"
        raise ApiError(400, message, param="logprobs")


def prompts_of(asked: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts: one text, several texts, one list of ids or several lists. Raises `ApiError`."""
    given: str | list[Any] = asked.prompt
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}):
        return given
    raise ApiError(400, "prompt: must be a text, token ids, or a list of either, not empty or mixed", param="prompt")


def needs_tokenizer(given: str | list[int], asked: CompletionRequest) -> bool:
    """Return whether `read_prompt` may take long, because it needs the tokenizer."""
    return isinstance(given, str) or bool(asked.echo)


def read_prompt(given: str | list[int], asked: CompletionRequest, model: ServedModel) -> Prompt:
    """Return a prompt's token ids and, for an echo, its text: as given, or decoded from the ids. Raises `ApiError`."""
    if isinstance(given, list):
        _check_length(len(given), asked, model)
        text, offsets = _text_of(given, model) if asked.echo else ("", [])
        return Prompt(np.array(given, np.int32), text, offsets)
    _check_not_far_too_long(given, asked, model)
    special = asked.add_special_tokens is not False
    if not asked.echo or not model.tokenizer.is_fast:
        token_ids = model.tokenizer.encode(given, add_special_tokens=special)
        return read_prompt(token_ids, asked, model)
    encoded = model.tokenizer(given, add_special_tokens=special, return_offsets_mapping=True)
    _check_length(len(encoded["input_ids"]), asked, model)
    ends = accumulate((end for _, end in encoded["offset_mapping"]), max)  # added special tokens end at 0
    return Prompt(np.array(encoded["input_ids"], np.int32), given, [0, *ends][:-1])


def _check_length(length: int, asked: CompletionRequest, model: ServedModel, *, least: bool = False) -> None:
    budget, limit = asked.token_budget, model.max_context_tokens
    if not length:
        raise ApiError(400, "prompt: has no tokens; give at least one, such as the begin token", param="prompt")
    if length + budget > limit:
        message = (
            f"the model's context is {limit} tokens, but the prompt has {'more than ' * least}{length} and max_tokens "
            f"asks for {budget} more: shorten one of them"
        )
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


def _check_not_far_too_long(text: str, asked: CompletionRequest, model: ServedModel) -> None:
    """Refuse a text of more than about twice the context without tokenizing all of it.

    The text is tokenized in parts, so that one of any length takes no more time and memory than one that fits. The
    limit is twice the context because a part may have a few more tokens than the same text within the whole.
    """
    context, tokens = model.max_context_tokens, 0
    for start in range(0, len(text), context) if len(text) > context else ():
        tokens += len(model.tokenizer.encode(text[start : start + context], add_special_tokens=False))
        if tokens > 2 * context:
            _check_length(tokens, asked, model, least=True)


def _text_of(token_ids: Sequence[int], model: ServedModel) -> tuple[str, list[int]]:
    """Return the text of token ids, and where each token begins in it."""
    text = IncrementalText(decoder(model.tokenizer, skip_special_tokens=False))
    pieces = [text.push([token_id]) for token_id in token_ids]
    starts = [0, *accumulate(map(len, pieces))]
    return "".join([*pieces, text.flush()]), starts[:-1]
