"""Translates a completion request into requests to the engine, and the engine's arrays into its choices.

There are no sockets and no engine here. Prompts become token ids, each choice a `GenerateRequest`, and each echoed
prompt a `ScoreRequest`. Tokens and log-probabilities become text, columns and finish reasons.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec import UNSET

from spot_async.base.seeds import derive_seed
from spot_async.serving.api import GenerateRequest, ScoreRequest
from spot_async.serving.openai.api import (
    LOWEST_LOGPROB,
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Logprobs,
    Usage,
)
from spot_async.serving.openai.texts import TokenTexts, decoder, pieces
from spot_async.types import FinishReason, FloatArray, Generation, IntArray, SamplingSettings, TokenScores

# Below this the likeliest token is taken, as at 0: such a number means "almost 0", and float32 must divide by it.
GREEDY_TEMPERATURE = 1e-4
MAX_REPLY_LOGPROBS = 1 << 22  # each takes 100 bytes while a reply is written

Answer = tuple[TokenScores | None, Generation | None]  # to `scoring` and to `generation`


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
        self._asked = asked
        self._prompts = prompts
        self._model = model
        self._seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self._greedy = asked.temperature is not None and asked.temperature < GREEDY_TEMPERATURE
        ends = () if asked.ignore_eos else model.end_token_ids
        self._stop_token_ids = tuple(dict.fromkeys([*ends, *(asked.stop_token_ids or ())]))
        self._check_reply()

    @property
    def choices(self) -> range:
        return range(len(self._prompts))

    @property
    def temperature(self) -> float:
        """The temperature of reported log-probabilities. With greedy sampling it is 1."""
        return 1.0 if self._greedy or self._asked.temperature is None else self._asked.temperature

    def generation(self, index: int) -> GenerateRequest | None:
        """Return the engine's request for choice `index`; None if no token is wanted.

        Its seed depends only on its place in the request.
        """
        if not self._asked.token_budget:
            return None
        sampling = SamplingSettings(
            temperature=0.0 if self._greedy else self.temperature,
            top_p=self._asked.top_p or 1.0,
            max_tokens=self._asked.token_budget,
            stop_token_ids=self._stop_token_ids,
            seed=derive_seed(self._seed, "prompt", index, "sample", 0),
        )
        top_k = self._asked.logprobs or 0
        return GenerateRequest(
            prompt_ids=self._prompts[index].token_ids, sampling=sampling, top_k=top_k, timeout_s=math.inf
        )

    def scoring(self, index: int) -> ScoreRequest | None:
        """Return the engine's request to score a prompt's tokens after the first; None if that is not needed."""
        token_ids = self._prompts[index].token_ids
        if not self._asked.echo or self._asked.logprobs is None or len(token_ids) < 2:
            return None
        return ScoreRequest(
            prompt_ids=token_ids[:1],
            response_ids=token_ids[1:],
            top_k=self._asked.logprobs,
            temperature=self.temperature,
            timeout_s=math.inf,
        )

    def requests(self) -> Iterable[GenerateRequest | ScoreRequest]:
        for index in self.choices:
            yield from filter(None, (self.scoring(index), self.generation(index)))

    def reply(self, answers: Sequence[Answer]) -> Completion:
        """Return the whole reply. `answers` are the engine's, one for each choice."""
        read = sum(len(prompt.token_ids) for prompt in self._prompts)
        written = sum(len(sampled.token_ids) for _, sampled in answers if sampled is not None)
        return Completion(
            id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._model.name,
            choices=[self._choice(index, *answer) for index, answer in enumerate(answers)],
            usage=Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written),
        )

    def _choice(self, index: int, scores: TokenScores | None, sampled: Generation | None) -> Choice:
        """Write one choice: the prompt if it is echoed, then what was sampled. An end token adds no text."""
        prompt = self._prompts[index]
        prompt_ids: list[int] = prompt.token_ids.tolist()
        text, columns = prompt.text, Logprobs()
        token_ids: list[int] = []
        finish_reason: FinishReason = "length"
        if self._asked.echo:
            columns.tokens.append(self._name(prompt_ids[0]))
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            columns.text_offset.append(0)
        if scores is not None:
            self._add(columns, prompt_ids[1:], prompt.offsets[1:], scores)
        if sampled is not None:
            token_ids, finish_reason = sampled.token_ids.tolist(), sampled.finish_reason
            shown = token_ids[:-1] if finish_reason == "stop" else token_ids
            new = pieces(decoder(self._model.tokenizer, skip_special_tokens=True), shown, prompt_ids)
            offsets = [*accumulate(map(len, new), initial=len(text))][: len(token_ids)]
            if self._asked.logprobs is not None:
                self._add(columns, token_ids, offsets, sampled)
            text += "".join(new)
        by_id = self._asked.return_token_ids
        return Choice(
            index=index,
            text=text,
            logprobs=None if self._asked.logprobs is None else columns,
            finish_reason=finish_reason,
            token_ids=token_ids if by_id else UNSET,
            prompt_token_ids=prompt_ids if by_id else UNSET,
        )

    def _add(
        self, columns: Logprobs, token_ids: Sequence[int], offsets: Sequence[int], found: TokenScores | Generation
    ) -> None:
        """Add tokens to the columns, with the engine's numbers of them."""
        names, values = [self._name(token_id) for token_id in token_ids], _finite(found.logprobs)
        for row, (name, value) in enumerate(zip(names, values, strict=True)):
            best: dict[str, float] = {}
            if found.topk_ids is not None and found.topk_logprobs is not None:
                ids = found.topk_ids[row].tolist()
                for token_id, logprob in zip(ids, _finite(found.topk_logprobs[row]), strict=True):
                    best.setdefault(self._name(token_id), logprob)  # the likeliest of tokens with the same text
            best.setdefault(name, value)
            columns.top_logprobs.append(best)
        columns.tokens.extend(names)
        columns.token_logprobs.extend(values)
        columns.text_offset.extend(offsets)

    def _name(self, token_id: int) -> str:
        by_id = self._asked.return_tokens_as_token_ids
        return f"token_id:{token_id}" if by_id else self._model.token_texts[token_id]

    def _check_reply(self) -> None:
        """Refuse a reply that would take too much memory on either side, or too long to write."""
        echoed = sum(len(prompt.token_ids) for prompt in self._prompts) if self._asked.echo else 0
        tokens = echoed + len(self._prompts) * self._asked.token_budget
        numbers = tokens * (self._asked.logprobs or 0)
        if numbers > MAX_REPLY_LOGPROBS:
            message = (
                f"logprobs={self._asked.logprobs}: of up to {tokens:,} tokens that makes a reply of {numbers:,} "
                f"numbers; at most {MAX_REPLY_LOGPROBS:,} are served: ask for fewer, or for fewer prompts at a time"
            )
            raise ApiError(400, message, param="logprobs")


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
    found = pieces(decoder(model.tokenizer, skip_special_tokens=False), token_ids)
    return "".join(found), [0, *accumulate(map(len, found))][:-1]
