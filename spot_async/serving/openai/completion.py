"""What a completion means: a JSON body becomes requests to the engine, and the engine's arrays become JSON again.

There are no sockets and no engine here. A field that is not served is refused by name if it would change the result.
Other unknown fields are ignored, as by OpenAI's own clients and servers. `ignore_eos`, `add_special_tokens`,
`stop_token_ids` and `return_*` are vLLM's additions, with vLLM's meaning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from spot_async.base.seeds import derive_seed
from spot_async.serving.api import GenerateRequest, ScoreRequest
from spot_async.serving.http.requests import UNREADABLE, Refusal
from spot_async.types import FloatArray, Generation, IntArray, SamplingSettings, TokenScores

# Below this the likeliest token is taken, as at 0: such a number means "almost 0", and float32 must divide by it.
GREEDY_TEMPERATURE = 1e-4
LOWEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has not; vLLM sends it too
MAX_REPLY_LOGPROBS = 1 << 22  # each takes 100 bytes while a reply is written
CONTEXT_TOKENS = 6  # before a response, with which its text is decoded: a character and the space before it fit

# Fields that are not served, by the values that would not change the result. None never would.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("stream", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("stop", "bad_words"), ([],)),
    **dict.fromkeys(("stream_options", "prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds"), ()),
    **dict.fromkeys(("allowed_token_ids", "logprob_token_ids", "structured_outputs", "guided_json"), ()),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar"), ()),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "response_format": ({"type": "text"},),
}
_INSTEAD = {
    "stream": "leave it out, and the whole reply comes at once",
    "stop": "give stop_token_ids, or cut the text yourself",
    "n": "ask as often",
    "prompt_logprobs": "ask for echo with logprobs",
}

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that are served. One that is None counts as not given."""

    prompt: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def token_budget(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @property
    def only_prompt(self) -> str | list[int]:
        """The text or the token ids, alone or in a list of one. Raises `Refusal` for several."""
        given: Any = self.prompt
        if isinstance(given, str) or {type(item) for item in given} <= {int}:
            return given  # type: ignore[no-any-return]
        if len(given) == 1:
            return given[0]  # type: ignore[no-any-return]
        raise Refusal(400, "prompt: must be one text or the token ids of one: send several at once", param="prompt")


def read_request(body: bytes | memoryview) -> CompletionRequest:
    """Decode a request. Raises `Refusal` if it is malformed, or asks for something that is not served."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        for name, neutral in _NEUTRAL.items():
            if (value := fields.get(name)) is not None and value not in neutral:
                instead = _INSTEAD.get(name, "leave it out")
                raise Refusal(400, f"{name}: is not served here; {instead}", param=name)
        asked = msgspec.convert(fields, CompletionRequest)
    except UNREADABLE as error:
        raise _malformed(error) from None
    if not asked.token_budget and not asked.echo:
        raise Refusal(400, "max_tokens=0: scores a prompt, so it needs echo to be true", param="max_tokens")
    return asked


def _malformed(error: Exception) -> Refusal:
    """Make one line of msgspec's message, which ends with the place of the error: "... - at `$.name[0]`"."""
    if isinstance(error, RecursionError):
        return Refusal(400, "cannot read the request: it is nested too deep")
    if not isinstance(error, msgspec.ValidationError):
        return Refusal(400, f"cannot read the request: not valid JSON: {error}")
    what, _, place = str(error).partition(" - at ")
    what, name = what[:1].lower() + what[1:], re.match(r"`\$\.(\w+)", place)
    return Refusal(400, f"{name[1] if name else 'cannot read the request'}: {what}", param=name[1] if name else None)


class TokenTexts:
    """Turns token ids into text, also single ones: as inside a longer text, with the space before a word."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = max(map(len, tokenizer.get_vocab()))  # characters, or more, that a token stands for
        self._neighbour = tokenizer.encode("a", add_special_tokens=False)[-1:]  # any token will do
        self.of = functools.cache(lambda token_id: self.after(self._neighbour, [token_id]))  # of a single one

    def after(self, context: Sequence[int], token_ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text that token ids add after others. `special`: special tokens have a text too."""
        before = list(context[-CONTEXT_TOKENS:])
        return self._decode([*before, *token_ids], special)[len(self._decode(before, special)) :]

    def _decode(self, token_ids: list[int], special: bool) -> str:
        """Decode without those clean-ups that depend on what follows."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text


class Prompt(NamedTuple):
    token_ids: IntArray  # (P,)
    text: str  # empty unless it is echoed


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What `/v1` knows about the model, and what it refuses to ask of it."""

    name: str
    directory: str
    max_context_tokens: int
    max_logprobs: int
    end_token_ids: tuple[int, ...]
    tokenizer: Any
    token_texts: TokenTexts

    def check(self, asked: CompletionRequest) -> None:
        """Raise `Refusal` for whatever can be refused before a prompt is read."""
        if asked.model not in (None, self.name):
            message = f"the model `{asked.model}` does not exist; this server has `{self.name}`"
            raise Refusal(404, message, param="model", code="model_not_found")
        if asked.logprobs is not None and asked.logprobs > self.max_logprobs:
            message = f"logprobs={asked.logprobs}: at most {self.max_logprobs} are served"
            raise Refusal(400, message, param="logprobs")

    def read(self, given: str | list[int], asked: CompletionRequest) -> Prompt:
        """Return a prompt's token ids and, for an echo, its text. Raises `Refusal`."""
        ids = given
        if isinstance(ids, str):
            if len(ids) > self.max_context_tokens * self.token_texts.longest:  # it would take long to find out how many
                self._check_length(self.max_context_tokens + 1, asked, least=True)
            ids = self.tokenizer.encode(ids, add_special_tokens=asked.add_special_tokens is not False)
        self._check_length(len(ids), asked)
        text = given if isinstance(given, str) else self.token_texts.after([], ids) if asked.echo else ""
        return Prompt(np.array(ids, np.int32), text if asked.echo else "")

    def _check_length(self, length: int, asked: CompletionRequest, *, least: bool = False) -> None:
        budget, limit = asked.token_budget, self.max_context_tokens
        if not length:
            raise Refusal(400, "prompt: has no tokens; give at least one, such as the begin token", param="prompt")
        if length + budget > limit:
            message = (
                f"the model's context is {limit} tokens, but the prompt has {'at least ' * least}{length} and "
                f"max_tokens asks for {budget} more: shorten one of them"
            )
            raise Refusal(400, message, param="prompt", code="context_length_exceeded")


class Plan:
    """One request, checked and ready for the engine. Raises `Refusal`."""

    def __init__(self, asked: CompletionRequest, prompt: Prompt, model: ServedModel) -> None:
        self._asked = asked
        self._prompt = prompt
        self._model = model
        self._greedy = asked.temperature is not None and asked.temperature < GREEDY_TEMPERATURE
        # Of the log-probabilities that are reported. With greedy sampling it is 1.
        self._temperature = 1.0 if self._greedy or asked.temperature is None else asked.temperature
        tokens = asked.token_budget + (len(prompt.token_ids) if asked.echo else 0)
        numbers = tokens * (asked.logprobs or 0)
        if numbers > MAX_REPLY_LOGPROBS:  # it would take too much memory on either side, or too long to write
            message = (
                f"logprobs={asked.logprobs}: of up to {tokens:,} tokens that makes a reply of {numbers:,} numbers; at "
                f"most {MAX_REPLY_LOGPROBS:,} are served: ask for fewer"
            )
            raise Refusal(400, message, param="logprobs")

    @property
    def generation(self) -> GenerateRequest | None:
        """The engine's request for new tokens; None if none is wanted."""
        asked = self._asked
        if not asked.token_budget:
            return None
        ends = () if asked.ignore_eos else self._model.end_token_ids
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        sampling = SamplingSettings(
            temperature=0.0 if self._greedy else self._temperature,
            top_p=asked.top_p or 1.0,
            max_tokens=asked.token_budget,
            stop_token_ids=tuple(dict.fromkeys([*ends, *(asked.stop_token_ids or ())])),
            seed=derive_seed(seed, "prompt", 0, "sample", 0),
        )
        prompt_ids, top_k = self._prompt.token_ids, asked.logprobs or 0
        return GenerateRequest(prompt_ids=prompt_ids, sampling=sampling, top_k=top_k, timeout_s=math.inf)

    @property
    def scoring(self) -> ScoreRequest | None:
        """The engine's request to score the prompt's tokens after the first; None if that is not needed."""
        token_ids = self._prompt.token_ids
        if not self._asked.echo or self._asked.logprobs is None or len(token_ids) < 2:
            return None
        return ScoreRequest(
            prompt_ids=token_ids[:1],
            response_ids=token_ids[1:],
            top_k=self._asked.logprobs,
            temperature=self._temperature,
            timeout_s=math.inf,
        )

    def reply(self, scores: TokenScores | None, sampled: Generation | None) -> dict[str, Any]:
        """Return the reply: the prompt if it is echoed, then what was sampled. An end token adds no text."""
        asked, (prompt, text) = self._asked, self._prompt
        prompt_ids: list[int] = prompt.tolist()
        token_ids: list[int] = [] if sampled is None else sampled.token_ids.tolist()
        reason = "length" if sampled is None else sampled.finish_reason
        shown = token_ids[:-1] if reason == "stop" else token_ids
        rows: list[tuple[str, float | None, dict[str, float] | None]] = []
        if asked.echo:  # nothing comes before a text's first token, so it has no numbers
            rows.append((self._name(prompt_ids[0]), None, None))
        rows += [] if scores is None else self._rows(prompt_ids[1:], scores)
        rows += [] if sampled is None else self._rows(token_ids, sampled)
        names = ("tokens", "token_logprobs", "top_logprobs")
        columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
        choice = {
            "index": 0,
            "text": text + self._model.token_texts.after(prompt_ids, shown, special=False),
            "logprobs": None if asked.logprobs is None else columns,
            "finish_reason": reason,
            **({"token_ids": token_ids, "prompt_token_ids": prompt_ids} if asked.return_token_ids else {}),
        }
        read, written = len(prompt_ids), len(token_ids)
        return {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": [choice],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }

    def _rows(
        self, token_ids: Sequence[int], found: TokenScores | Generation
    ) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Yield name, log-probability and likeliest tokens of each token."""
        if self._asked.logprobs is None:
            return
        for row, (token_id, value) in enumerate(zip(token_ids, _finite(found.logprobs), strict=True)):
            best: dict[str, float] = {}
            if found.topk_ids is not None and found.topk_logprobs is not None:
                ids = found.topk_ids[row].tolist()
                for each, logprob in zip(ids, _finite(found.topk_logprobs[row]), strict=True):
                    best.setdefault(self._name(each), logprob)  # the likeliest of tokens with the same text
            best.setdefault(self._name(token_id), value)
            yield self._name(token_id), value, best

    def _name(self, token_id: int) -> str:
        by_id = self._asked.return_tokens_as_token_ids
        return f"token_id:{token_id}" if by_id else self._model.token_texts.of(token_id)


def _finite(logprobs: FloatArray) -> list[float]:
    values: list[float] = np.maximum(logprobs, np.float32(LOWEST_LOGPROB)).tolist()
    return values
