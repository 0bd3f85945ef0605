"""Finds out what an OpenAI-compatible endpoint understands, by asking it at start-up. Nothing is assumed.

Every probe is a real request of a few tokens. A refusal of a request's form (400, 404, 422) means that the endpoint
does not speak so. So does a 5xx or a reply that cannot be read, since gateways answer so what they cannot pass on. But
it may be trouble that passes as well, and then everything is asked once more. An endpoint that asks to be left alone is
asked again later; every other failure is its trouble and stops the start. Probes of generation are sent as generations
are, so that no field is refused only later.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import structlog

from spot_async.errors import ConfigError, DeadlineExceededError, RequestError, TransientError
from spot_async.types import LogprobTemperature, SamplingSettings

from ..shared.remote import RemoteServer
from ..shared.replies import only
from ..shared.token_texts import TOKEN_ID_PREFIX
from .billing import request_size
from .chat import ChatReply
from .dialect import (
    CHAT,
    COMPLETIONS,
    MODELS,
    PROBE_TEXT,
    UNTRUNCATED,
    Dialect,
    Scoring,
    UnsupportedError,
    as_said,
    failed_at,
    question,
)
from .replies import Choice, Completion, Row, read_echoed_row, read_prompt_row
from .throttling import when_free

LARGEST_K_ASKED = 256
OTHER_TEMPERATURE = 0.5
SAME_NATS = 0.1  # more than noise, less than another temperature changes
CHAT_PROBE_TOKENS = 16
NO_SUCH_PATH = ("HTTP 404", "HTTP 405")
PAUSE_S = 0.5  # before everything is asked once more

T = TypeVar("T")
R = TypeVar("R", Completion, ChatReply)


async def probe(server: RemoteServer, prompt_ids: Sequence[int], fields: Mapping[str, Any], deadline: float) -> Dialect:
    """Ask everything; `prompt_ids` is `PROBE_TEXT`, `fields` what the user wants in every request."""
    prober = _Prober(server, list(prompt_ids), fields, deadline)
    return await prober.find()


class _Prober:
    def __init__(self, server: RemoteServer, prompt_ids: list[int], fields: Mapping[str, Any], deadline: float) -> None:
        self._server = server
        self._prompt_ids = prompt_ids
        self._tokenizer = server.files.vocabulary.tokenizer
        self._fields = fields
        self._deadline = deadline
        ends = tuple(server.files.vocabulary.end_token_ids)
        self._sampling = SamplingSettings(max_tokens=1, stop_token_ids=ends, seed=1)
        self._refused: list[tuple[str, str]] = []  # questions that were not understood, with their answers
        self._has_failed = False  # at one of them

    async def find(self) -> Dialect:
        """Where the endpoint failed at a question, what it says to all of them the second time."""
        try:
            found = await self._interview()
            if not self._has_failed:
                return found
        except DeadlineExceededError:
            raise
        except (ConfigError, TransientError, UnsupportedError):
            if not self._has_failed:
                raise
        await asyncio.sleep(PAUSE_S)
        found = await self._interview()
        if self._has_failed:
            log = structlog.get_logger()
            log.warning("an endpoint failed twice at questions, so it is not asked so", said=as_said(self._refused))
        return found

    async def _interview(self) -> Dialect:
        self._refused, self._has_failed = [], False
        try:
            return await self._questions()
        except DeadlineExceededError as error:
            raise error.reworded(f"{error}; {as_said(self._refused)}") if self._refused else error from None

    async def _questions(self) -> Dialect:
        dialect = await self._model()
        found = await self._completions(dialect)
        if found is None:
            return await self._chat(dialect)
        dialect = await self._scoring(await self._generating(found))
        if dialect.scoring is not None:
            dialect = replace(dialect, score_temperature=await self._score_temperature(dialect))
        if dialect.generation_logprobs:
            dialect = replace(dialect, generation_temperature=await self._generation_temperature(dialect))
        return dialect

    async def _model(self) -> Dialect:
        """The model's name, and the context that the endpoint states (vLLM and SGLang do)."""
        wanted, role = self._server.settings.served_model, self._server.role
        get = functools.partial(self._server.get, MODELS, _Models, deadline=self._deadline)
        try:
            listed: _Models | None = await self._understood(question(MODELS), get)
        except UnsupportedError:
            listed = None
        models = listed.data if listed is not None else []
        names = [each.id for each in models]
        if wanted is None and len(names) != 1:
            known = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            if listed is None:
                known = f"no list ({as_said(self._refused)})"
            raise ConfigError(f"{role}.backend.served_model: required, since the endpoint serves {known or 'no model'}")
        name = wanted or names[0]
        context = next((each.max_model_len for each in models if each.id == name), None)
        return Dialect(model=name, max_context_tokens=context, lists_models=listed is not None)

    async def _completions(self, dialect: Dialect) -> Dialect | None:
        """The best form of request that it takes; None when it has no completions."""
        for token_id_prompts in (True, False):
            asked = replace(dialect, token_id_prompts=token_id_prompts)
            if (best := await self._form(asked, extensions=True, logprobs=True)) is not None:
                return best
            if (plainest := await self._form(asked, extensions=False, logprobs=False)) is None:
                continue  # nor anything between the two
            for extensions, logprobs in ((True, False), (False, True)):
                if (better := await self._form(asked, extensions=extensions, logprobs=logprobs)) is not None:
                    return better
            return plainest
        return None

    async def _form(self, dialect: Dialect, *, extensions: bool, logprobs: bool) -> Dialect | None:
        """The dialect with what is found of it by a completion of this form; None when that is not understood."""
        asked = replace(dialect, extensions=extensions)
        reply = await self._tried(asked, {"logprobs": 1} if logprobs else {})
        if reply is None:
            return None
        choice = reply.only
        return replace(
            asked,
            prepends_start=_prompt_tokens(reply) == len(self._prompt_ids) + 1,
            generation_logprobs=choice.logprobs is not None,
            sampled_token_ids=_names_ids(choice) and choice.logprobs is not None,
        )

    async def _tried(self, asked: Dialect, more: Mapping[str, Any]) -> Completion | None:
        prompt = self._prompt(asked)
        body = {"model": asked.model, "prompt": prompt, "max_tokens": 1, **asked.extra, **more}
        reply = await self._ask(body)
        if reply is not None and asked.token_id_prompts and _prompt_tokens(reply) not in (None, len(self._prompt_ids)):
            read = f"read {_prompt_tokens(reply)} tokens where {len(self._prompt_ids)} were sent"
            self._refused.append((question(COMPLETIONS, body), read))
            return None  # it took the list for something else
        return reply

    async def _generating(self, dialect: Dialect) -> Dialect:
        """Raises `ConfigError` when it refuses a generation as runs ask for them."""

        async def ask(asked: Dialect) -> None:
            await self._post(asked.generate_body(self._prompt(asked), self._sampling, self._tokenizer))

        before = len(self._refused)
        try:
            return await self._untruncated(dialect, ask)
        except UnsupportedError:
            said = as_said(self._refused[before:])
            raise ConfigError(f"{self._server.role}.backend.url: refuses to sample as a run asks it: {said}") from None

    async def _untruncated(self, dialect: Dialect, ask: Callable[[Dialect], Awaitable[None]]) -> Dialect:
        """The dialect with the fields that switch truncation off, as far as the endpoint takes them.

        Fields that the user gave stay. Raises `UnsupportedError` when even the plain request is refused.
        """
        await ask(dialect)
        wanted = {name: value for name, value in UNTRUNCATED.items() if name not in self._fields}

        async def takes(fields: Mapping[str, Any]) -> bool:
            try:
                await ask(replace(dialect, untruncated=fields))
            except UnsupportedError:
                return False
            return True

        if not await takes(wanted):
            wanted = {name: value for name, value in wanted.items() if await takes({name: value})}
        return replace(dialect, untruncated=wanted)

    async def _scoring(self, dialect: Dialect) -> Dialect:
        ways: tuple[Scoring, ...] = ("prompt_logprobs", "echo", "echo_and_generate")
        before = len(self._refused)
        for way in ways:
            asked = replace(dialect, scoring=way)
            choice = await self._scored(asked, 1)
            if choice is None:
                continue
            if way == "prompt_logprobs" and choice.prompt_logprobs is not None:
                if choice.prompt_token_ids is None and not dialect.token_id_prompts:
                    continue  # rows by id, but of tokens that nobody names
                return replace(asked, max_top_k=await self._largest_k(asked))
            if way != "prompt_logprobs" and _echoes(choice):
                tokens = choice.logprobs.tokens if choice.logprobs is not None else []
                by_text = not all(token.startswith(TOKEN_ID_PREFIX) for token in tokens)
                asked = replace(asked, keyed_by_text=by_text)
                return replace(asked, max_top_k=await self._largest_k(asked))
            body = asked.score_body(self._prompt(asked), 1)
            self._refused.append((question(COMPLETIONS, body), "no log-probabilities of the prompt in the answer"))
        return replace(dialect, unscored=as_said(self._refused[before:]))

    async def _scored(self, dialect: Dialect, k: int) -> Choice | None:
        reply = await self._ask(dialect.score_body(self._prompt(dialect), k))
        return None if reply is None else reply.only

    async def _largest_k(self, dialect: Dialect) -> int:
        """The largest K served: what a refusal names, or found by halving."""
        limit = min(LARGEST_K_ASKED, self._server.files.vocab_size)

        async def refusal(k: int) -> str | None:
            try:
                await self._post(dialect.score_body(self._prompt(dialect), k))
            except UnsupportedError as error:
                return str(error)
            return None

        served, refused = await largest_served(limit, refusal)
        return served if refused else min(served, await self._counted(dialect, served))

    async def _counted(self, dialect: Dialect, k: int) -> int:
        """How many of K it really gave: some endpoints cut without a word. Texts that collide are no cut."""
        choice = (await self._post(dialect.score_body(self._prompt(dialect), k))).only
        given = max(map(len, _rows(choice)))
        return k if given >= k or (dialect.keyed_by_text and given > k // 2) else max(1, given - 1)

    async def _score_temperature(self, dialect: Dialect) -> LogprobTemperature:
        """A refusal of another temperature than 1 means 1."""
        prompt = self._prompt(dialect)
        one, other = [
            await self._ask(dialect.score_body(prompt, 1, temperature=temperature))
            for temperature in (1.0, OTHER_TEMPERATURE)
        ]
        return "one" if one is None or other is None or _same_numbers(one.only, other.only) else "request"

    async def _generation_temperature(self, dialect: Dialect) -> LogprobTemperature:
        """Likewise."""
        found = []
        for temperature in (1.0, OTHER_TEMPERATURE):
            sampling = msgspec.structs.replace(self._sampling, temperature=temperature)
            body = dialect.generate_body(self._prompt(dialect), sampling, self._tokenizer)
            reply = await self._ask({**body, "logprobs": 2})
            logprobs = reply.only.logprobs if reply is not None else None
            rows = logprobs.top_logprobs if logprobs is not None else None
            found.append(read_echoed_row(rows[0]) if rows else {})
        one, other = found
        moved = [abs((one[key] or 0.0) - (other[key] or 0.0)) for key in one.keys() & other.keys()]
        return "one" if max(moved, default=0.0) < SAME_NATS else "request"

    async def _chat(self, dialect: Dialect) -> Dialect:
        sampling = msgspec.structs.replace(self._sampling, max_tokens=CHAT_PROBE_TOKENS)

        async def ask(asked: Dialect) -> None:
            await self._posted(CHAT, asked.chat_body(PROBE_TEXT, sampling), ChatReply)

        unscored = replace(dialect, unscored=as_said(self._refused))
        for key in ("max_completion_tokens", "max_tokens"):
            with contextlib.suppress(UnsupportedError):
                return await self._untruncated(replace(unscored, chat_length_key=key), ask)
        message = f"{self._server.role}.backend.url: answers neither {COMPLETIONS} nor {CHAT}: {as_said(self._refused)}"
        if all(answer.startswith(NO_SUCH_PATH) for _, answer in self._refused):
            message += "; the url is what comes before /v1"
        raise TransientError(message) if self._has_failed else ConfigError(message)

    def _prompt(self, dialect: Dialect) -> list[int] | str:
        return self._prompt_ids if dialect.token_id_prompts else PROBE_TEXT

    async def _ask(self, body: Mapping[str, Any]) -> Completion | None:
        try:
            return await self._post(body)
        except UnsupportedError:
            return None

    async def _post(self, body: Mapping[str, Any]) -> Completion:
        return await self._posted(COMPLETIONS, body, Completion)

    async def _posted(self, path: str, body: Mapping[str, Any], kind: type[R]) -> R:
        sent = {**self._fields, **body}
        size = request_size(sent, len(self._prompt_ids))

        decoder: msgspec.json.Decoder[R] = msgspec.json.Decoder(kind)

        def decode(raw: bytes) -> R:
            reply = decoder.decode(raw)
            only(reply.choices)  # one that has another number of them is none
            return reply

        ask = functools.partial(self._server.ask, path, sent, decode, deadline=self._deadline, size=size)
        return await self._understood(question(path, body), ask)

    async def _understood(self, asked: str, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer. Raises `UnsupportedError` where the question was not understood, and notes what was said."""
        try:
            return await when_free(ask, self._deadline)
        except RequestError as error:
            if not isinstance(error, UnsupportedError) and not failed_at(error):
                raise
            self._has_failed = self._has_failed or failed_at(error)
            self._refused.append((asked, str(error).partition(": ")[2]))
            raise error if isinstance(error, UnsupportedError) else UnsupportedError(str(error)) from None


async def largest_served(limit: int, refusal: Callable[[int], Awaitable[str | None]]) -> tuple[int, bool]:
    """The largest K up to `limit` that is not refused, and whether one was; K = 1 is served.

    `refusal` says why a K is refused, or None. What it says often names the limit.
    """
    said = await refusal(limit)
    if said is None:
        return limit, False
    low, high = 1, limit  # served, refused
    for named in sorted({int(number) for number in re.findall(r"\d+", said)}, reverse=True):
        if low < named < high and await refusal(named) is None:
            if await refusal(named + 1) is not None:
                return named, True
            low = named + 1
            break
    while high - low > 1:
        middle = (low + high) // 2
        if await refusal(middle) is None:
            low = middle
        else:
            high = middle
    return low, True


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def _prompt_tokens(reply: Completion) -> int | None:
    return reply.usage.prompt_tokens if reply.usage is not None else None


def _names_ids(choice: Choice) -> bool:
    tokens = choice.logprobs.tokens if choice.logprobs is not None else []
    return choice.token_ids is not None or (bool(tokens) and all(each.startswith(TOKEN_ID_PREFIX) for each in tokens))


def _rows(choice: Choice) -> list[Row]:
    if choice.prompt_logprobs is not None:
        return [read_prompt_row(row) for row in choice.prompt_logprobs]
    rows = choice.logprobs.top_logprobs if choice.logprobs is not None else None
    return [read_echoed_row(row) for row in rows or []]


def _echoes(choice: Choice) -> bool:
    """Whether a reply to `echo` has the prompt's log-probabilities: all but the first token's."""
    logprobs = choice.logprobs
    if logprobs is None or len(logprobs.token_logprobs) < 3:
        return False
    rows = _rows(choice)
    return all(value is not None for value in logprobs.token_logprobs[1:]) and bool(rows) and all(rows[1:])


def _same_numbers(one: Choice, other: Choice) -> bool:
    """Whether two readings of the same prompt agree; temperatures of 1 and 0.5 differ by far more than noise."""

    def found(choice: Choice) -> list[float]:
        if choice.prompt_logprobs is not None:
            return [value or 0.0 for row in _rows(choice)[1:] for value in row.values()]
        # a generated token at the end is another one each time
        return [] if choice.logprobs is None else [value or 0.0 for value in choice.logprobs.token_logprobs[1:-1]]

    pairs = zip(found(one), found(other), strict=False)
    return max((abs(a - b) for a, b in pairs), default=0.0) < SAME_NATS
