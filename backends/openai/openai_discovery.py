"""Finds out what an OpenAI-compatible endpoint understands, by asking it at start-up. Nothing is assumed.

Every question is a real request for a few tokens. The answers mean:

* A refusal of the request's form (400, 404, 422): the endpoint does not understand it.
* A 5xx, or a reply that cannot be read: the same, since gateways answer so if they cannot pass a request on. But the
  fault may also pass, so everything is asked once more.
* Throttling: ask again later (`Server.starting`).
* Any other failure is an error, and stops the start.

Questions about generation are sent exactly as generations are, so that no field is refused only later.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import structlog

from spot_async.errors import ConfigError, DeadlineExceededError, RequestError, TransientError
from spot_async.models.precision import OTHER_MEAN_NATS
from spot_async.types import LogprobTemperature, SamplingSettings

from ..shared.discovery import MODELS, ModelList
from ..shared.remote import RemoteServer
from ..shared.replies import only
from ..shared.token_texts import TOKEN_ID_PREFIX
from .dialect import (
    CHAT,
    COMPLETIONS,
    NEUTRAL,
    PLAIN_TEXT,
    Dialect,
    Scoring,
    UnsupportedError,
    as_said,
    failed_at,
    largest_served,
    question,
    request_size,
)
from .replies import ChatReply, Choice, Completion, Row, read_echoed_row, read_prompt_row

LARGEST_K_ASKED = 256
OTHER_TEMPERATURE = 0.5
CHAT_ANSWER_TOKENS = 16
NO_SUCH_PATH = ("HTTP 404", "HTTP 405")
PAUSE_S = 0.5  # the pause before everything is asked once more

T = TypeVar("T")
R = TypeVar("R", Completion, ChatReply)


async def discover(
    server: RemoteServer, prompt_ids: Sequence[int], fields: Mapping[str, Any], deadline: float
) -> Dialect:
    """Ask the endpoint everything and return its dialect.

    `prompt_ids` are the tokens of `PLAIN_TEXT`. `fields` are those that the user wants in every request.
    """
    return await _Discovery(server, list(prompt_ids), fields, deadline).find()


class _Discovery:
    """Asks one endpoint, and notes what it did not understand."""

    def __init__(self, server: RemoteServer, prompt_ids: list[int], fields: Mapping[str, Any], deadline: float) -> None:
        self._server = server
        self._prompt_ids = prompt_ids
        self._tokenizer = server.files.vocabulary.tokenizer
        self._fields = fields
        self._deadline = deadline
        ends = tuple(server.files.vocabulary.end_token_ids)
        self._sampling = SamplingSettings(max_tokens=1, stop_token_ids=ends, seed=1)
        self._refused: list[tuple[str, str]] = []  # questions that were not understood, with their answers
        self._has_failed = False  # whether the endpoint failed over one of them (`failed_at`)

    async def find(self) -> Dialect:
        """Ask all questions. If the endpoint failed over one, ask all of them again and believe the second answers."""
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
            log.warning(
                "an endpoint failed twice over requests, so such requests are not sent", said=as_said(self._refused)
            )
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
        if found.token_id_prompts:
            await self._check_last_id(found)
        dialect = await self._scoring(await self._generating(found))
        if dialect.scoring is not None:
            dialect = replace(dialect, score_temperature=await self._temperature(self._scores_at, dialect))
        if dialect.generation_logprobs:
            dialect = replace(dialect, generation_temperature=await self._temperature(self._likeliest_at, dialect))
        return dialect

    async def _model(self) -> Dialect:
        """Find out the model's name, and the context length that the endpoint states (vLLM and SGLang do)."""
        wanted, role = self._server.settings.served_model, self._server.role
        get = functools.partial(self._server.get, MODELS, ModelList, deadline=self._deadline)
        try:
            listed: ModelList | None = await self._understood(question(MODELS), get)
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
        """Find the best form of request that the endpoint accepts; None if it has no completions."""
        for token_id_prompts in (True, False):
            asked = replace(dialect, token_id_prompts=token_id_prompts)
            if (best := await self._form(asked, extensions=True, logprobs=True)) is not None:
                return best
            if (plainest := await self._form(asked, extensions=False, logprobs=False)) is None:
                continue  # if the plainest form is not understood, no form in between is
            for extensions, logprobs in ((True, False), (False, True)):
                if (better := await self._form(asked, extensions=extensions, logprobs=logprobs)) is not None:
                    return better
            return plainest
        return None

    async def _form(self, dialect: Dialect, *, extensions: bool, logprobs: bool) -> Dialect | None:
        """Try a completion of this form. Return the dialect with what it shows; None if it is not understood."""
        asked = replace(dialect, extensions=extensions)
        reply = await self._tried(asked, {"logprobs": 1} if logprobs else {})
        if reply is None:
            return None
        choice = reply.only
        return replace(
            asked,
            prepends_start=reply.prompt_tokens == len(self._prompt_ids) + 1,
            generation_logprobs=choice.logprobs is not None,
            sampled_token_ids=_names_ids(choice) and choice.logprobs is not None,
        )

    async def _tried(self, asked: Dialect, more: Mapping[str, Any]) -> Completion | None:
        prompt = self._prompt(asked)
        body = {"model": asked.model, "prompt": prompt, "max_tokens": 1, **asked.extra, **more}
        reply = await self._ask(body)
        if reply is not None and asked.token_id_prompts and reply.prompt_tokens not in (None, len(self._prompt_ids)):
            read = f"read {reply.prompt_tokens} tokens where {len(self._prompt_ids)} were sent"
            self._refused.append((question(COMPLETIONS, body), read))
            return None  # it took the list of ids for something else
        return reply

    async def _check_last_id(self, dialect: Dialect) -> None:
        """Raise `ConfigError` if the endpoint has no token with the last id of the directory's vocabulary."""
        last, before = self._server.files.vocab_size - 1, len(self._refused)
        prompt = [*self._prompt_ids[:1], last]
        if await self._ask({"model": dialect.model, "prompt": prompt, "max_tokens": 1, **dialect.extra}) is None:
            raise ConfigError(
                f"{self._server.role}.model: its config.json says vocab_size={last + 1}, but the endpoint refuses "
                f"token {last}: give the served model's directory: {self._refused[before][1]}"
            )

    async def _generating(self, dialect: Dialect) -> Dialect:
        """Try a generation as a run asks for it. Raises `ConfigError` if that is refused."""

        async def ask(asked: Dialect) -> None:
            await self._post(asked.generate_body(self._prompt(asked), self._sampling, self._tokenizer))

        before = len(self._refused)
        try:
            return await self._neutral(dialect, ask)
        except UnsupportedError:
            said = as_said(self._refused[before:])
            raise ConfigError(f"{self._server.role}.backend.url: refuses to sample as a run asks it: {said}") from None

    async def _neutral(self, dialect: Dialect, ask: Callable[[Dialect], Awaitable[None]]) -> Dialect:
        """Return the dialect with those fields of `NEUTRAL` that the endpoint accepts.

        Fields that the user gave stay. Raises `UnsupportedError` if even the plain request is refused.
        """
        await ask(dialect)
        wanted = {name: values for name, values in NEUTRAL.items() if name not in self._fields}

        async def takes(fields: Mapping[str, Any]) -> bool:
            try:
                await ask(replace(dialect, neutral=fields))
            except UnsupportedError:
                return False
            return True

        async def taken(names: Sequence[str]) -> dict[str, Any]:
            """Return which of these fields it takes. Halves are asked for, since each answer may cost something."""
            for values in zip(*(wanted[name] for name in names), strict=False):
                fields = dict(zip(names, values, strict=True))
                if await takes(fields):
                    return fields
            if len(names) == 1:
                return {}
            half = len(names) // 2
            return await taken(names[:half]) | await taken(names[half:])

        return replace(dialect, neutral=await taken(list(wanted)) if wanted else {})

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
                    continue  # the rows are by id, but nothing names the tokens that they are of
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
        """Find the largest K served: a refusal may name it, else by halving."""
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
        """Return how many of K the endpoint really gives, since some cut silently. Colliding texts are no cut."""
        choice = (await self._post(dialect.score_body(self._prompt(dialect), k))).only
        given = max(map(len, _rows(choice)))
        # If there are fewer than K entries, one of them may be the token's own, which does not count.
        return k if given >= k or (dialect.keyed_by_text and given > k // 2) else max(1, given - 1)

    async def _temperature(
        self, numbers: Callable[[Dialect, float], Awaitable[dict[Any, float]]], dialect: Dialect
    ) -> LogprobTemperature:
        """Find out at which temperature log-probabilities are. A refusal of other temperatures than 1 means 1.

        The temperatures asked at lie so far apart that the mean tells. In 16 bits single tokens may move more.
        """
        one, other = [await numbers(dialect, temperature) for temperature in (1.0, OTHER_TEMPERATURE)]
        moved = [abs(one[key] - other[key]) for key in one.keys() & other.keys()]
        return "one" if not moved or fmean(moved) < OTHER_MEAN_NATS else "request"

    async def _scores_at(self, dialect: Dialect, temperature: float) -> dict[int, float]:
        """Return scores of the prompt, numbered."""
        reply = await self._ask(dialect.score_body(self._prompt(dialect), 1, temperature=temperature))
        if reply is None:
            return {}
        values: list[float | None] = []
        if reply.only.prompt_logprobs is not None:
            values = [value for row in _rows(reply.only)[1:] for value in row.values()]
        elif reply.only.logprobs is not None:  # the last token may be a generated one, which differs each time
            values = reply.only.logprobs.token_logprobs[1:-1]
        return {place: value or 0.0 for place, value in enumerate(values)}

    async def _likeliest_at(self, dialect: Dialect, temperature: float) -> dict[str, float]:
        """Return log-probabilities of the likeliest first tokens of a response, by their names."""
        sampling = msgspec.structs.replace(self._sampling, temperature=temperature)
        body = dialect.generate_body(self._prompt(dialect), sampling, self._tokenizer)
        reply = await self._ask({**body, "logprobs": 2})
        logprobs = reply.only.logprobs if reply is not None else None
        rows = logprobs.top_logprobs if logprobs is not None else None
        return {name: value or 0.0 for name, value in read_echoed_row(rows[0]).items()} if rows else {}

    async def _chat(self, dialect: Dialect) -> Dialect:
        sampling = msgspec.structs.replace(self._sampling, max_tokens=CHAT_ANSWER_TOKENS)

        async def ask(asked: Dialect) -> None:
            await self._posted(CHAT, asked.chat_body(PLAIN_TEXT, sampling), ChatReply)

        unscored = replace(dialect, unscored=as_said(self._refused))
        for key in ("max_completion_tokens", "max_tokens"):
            with contextlib.suppress(UnsupportedError):
                return await self._neutral(replace(unscored, chat_length_key=key), ask)
        message = f"{self._server.role}.backend.url: answers neither {COMPLETIONS} nor {CHAT}: {as_said(self._refused)}"
        if all(answer.startswith(NO_SUCH_PATH) for _, answer in self._refused):
            message += "; the url is what comes before /v1"
        raise TransientError(message) if self._has_failed else ConfigError(message)

    def _prompt(self, dialect: Dialect) -> list[int] | str:
        return self._prompt_ids if dialect.token_id_prompts else PLAIN_TEXT

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
            only(reply.choices)  # a reply with another number of choices cannot be read
            return reply

        ask = functools.partial(self._server.ask, path, sent, decode, deadline=self._deadline, size=size)
        return await self._understood(question(path, body), ask)

    async def _understood(self, asked: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a question. If it was not understood, note the answer and raise `UnsupportedError`."""
        try:
            return await ask()
        except RequestError as error:
            if not isinstance(error, UnsupportedError) and not failed_at(error):
                raise
            self._has_failed = self._has_failed or failed_at(error)
            self._refused.append((asked, str(error).partition(": ")[2]))
            raise error if isinstance(error, UnsupportedError) else UnsupportedError(str(error)) from None


def _names_ids(choice: Choice) -> bool:
    tokens = choice.logprobs.tokens if choice.logprobs is not None else []
    return choice.token_ids is not None or (bool(tokens) and all(each.startswith(TOKEN_ID_PREFIX) for each in tokens))


def _rows(choice: Choice) -> list[Row]:
    if choice.prompt_logprobs is not None:
        return [read_prompt_row(row) for row in choice.prompt_logprobs]
    rows = choice.logprobs.top_logprobs if choice.logprobs is not None else None
    return [read_echoed_row(row) for row in rows or []]


def _echoes(choice: Choice) -> bool:
    """Return whether a reply to `echo` has the log-probabilities of all prompt tokens after the first."""
    logprobs = choice.logprobs
    if logprobs is None or len(logprobs.token_logprobs) < 3:
        return False
    rows = _rows(choice)
    return all(value is not None for value in logprobs.token_logprobs[1:]) and bool(rows) and all(rows[1:])
