"""The backend for any OpenAI-compatible endpoint: a teacher that scores, a model that writes, or both.

`openai_discovery.py` finds out which dialect the endpoint understands, `dialect.py` makes requests in it, and
`replies.py` reads what comes back. An endpoint takes no weights from us, so as a student it can be evaluated but not
trained.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
from pydantic import Field

from spot_async.base.tasks import gather_answers
from spot_async.config import OneOrMore
from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, ThrottledError, TransientError
from spot_async.types import (
    Capabilities,
    Generation,
    IntArray,
    SamplingSettings,
    ScoreRequest,
    TokenScores,
)

from ..shared.bodies import Steps
from ..shared.connection import Url
from ..shared.discovery import MODELS, noise_nats
from ..shared.remote import RemoteBackend, RemoteServer, ServerKind
from ..shared.replies import check_end, check_generation, check_scores
from ..shared.request_limits import OPENAI_BAN, RequestLimits, logit_bias
from ..shared.settings import AttachedSettings
from ..shared.token_texts import UNKNOWN, TokenTexts
from .dialect import (
    CHAT,
    COMPLETIONS,
    PLAIN_TEXT,
    Dialect,
    UnsupportedError,
    failed_at,
    read_error,
    request_size,
    user_message,
)
from .openai_discovery import discover
from .replies import (
    ChatReply,
    Completion,
    PromptRows,
    check_not_aborted,
    echoed_rows,
    generation,
    prompt_rows,
    retokenized,
    token_scores,
    with_chunks,
)
from .text_alignment import align, as_text

DEFAULT_TOP_K = 64  # asked for if the endpoint allows it, because each one more tightens the entropy bounds
NOISE_READINGS = 3  # at the same time
UNAVAILABLE = 503
HARMFUL_FIELDS = {  # measured with vLLM 0.32.0
    "skip_reading_prefix_cache": "vLLM ends when it scores a prompt that is in its cache",
    "logprob_token_ids": "vLLM gives the requests beside it wrong log-probabilities",
}

_completion = msgspec.json.Decoder(Completion)
_chat_reply = msgspec.json.Decoder(ChatReply)


class OpenAIBackend(RemoteBackend):
    """A `Generator`, a `HealthCheck` and, where the endpoint gives log-probabilities of prompts, a `Scorer`."""

    _server: RemoteServer

    class Settings(AttachedSettings):
        kind: str = "openai"
        url: OneOrMore[Url] = Field(
            description="address of an endpoint, such as https://models.example.org/v1; a list for several"
        )
        request_fields: dict[str, Any] = Field(
            {}, description="further fields of every request, as the endpoint spells them"
        )

        @pydantic.field_validator("request_fields")
        @classmethod
        def _refuse_harmful(cls, fields: dict[str, Any]) -> dict[str, Any]:
            for name in HARMFUL_FIELDS.keys() & fields.keys():
                raise ValueError(f"{name} must not be sent: {HARMFUL_FIELDS[name]}")
            return fields

        @pydantic.model_validator(mode="before")
        @classmethod
        def _starts_nothing(cls, given: Any) -> Any:
            if isinstance(given, dict) and "launch" in given:
                raise ValueError("launch: kind openai starts no server: give the url of one that runs, or another kind")
            return given

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        self._settings = settings
        self._role = role
        self._name = settings.server_name(role)
        self._server = RemoteServer(
            settings,
            role=role,
            model=model,
            run_directory=run_directory,
            kind=ServerKind(read_error=functools.partial(read_error, role)),
        )
        self._files = self._server.files
        self._tokenizer = self._files.vocabulary.tokenizer
        self._found: Capabilities | None = None
        self._finding = asyncio.Lock()
        self._dialect: Dialect
        self._texts: TokenTexts | None = None  # None where all tokens are sent and received as ids
        self._noise_nats = 0.0
        self._refuses_bias = False

    async def ping(self, *, deadline: float) -> None:
        """Ask for the list of models, which costs nothing.

        Any refusal but 503 shows a live endpoint, and so does a 5xx of one that never listed its models. If only the
        process in front of the engine answers, this cannot tell. Then requests reach their own deadlines.
        """
        try:
            await self._server.endpoint.get(MODELS, deadline=deadline)
        except (PermanentError, ThrottledError, TransientError) as error:
            status = error.exchange.status if error.exchange is not None else None
            never_listed = self._found is not None and not self._dialect.lists_models
            if status == UNAVAILABLE or (isinstance(error, TransientError) and not (failed_at(error) and never_listed)):
                raise

    async def capabilities(self, *, deadline: float) -> Capabilities:
        async with self._finding:
            if self._found is None:
                with self._server.starting():
                    self._found = await self._find(deadline)
        return self._found

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        found = await self.capabilities(deadline=deadline)
        self._limits(found, found.max_generation_top_k).check(prompt_ids, top_k=top_k)
        if self._dialect.chat_length_key is not None:
            return await self._chat(prompt_ids, sampling, deadline)
        return await self._complete(prompt_ids, sampling, top_k, deadline)

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        found = await self.capabilities(deadline=request.deadline)
        if self._dialect.scoring is None:
            raise PermanentError(f"{self._server.section} only writes: it gives no log-probabilities of given tokens")
        limits = self._limits(found, found.max_top_k)
        limits.check(request.prompt_ids, top_k=top_k)
        limits.check(request.token_ids)
        if request.temperature != 1.0 and found.score_temperature == "one":
            raise PermanentError(f"{self._server.section} scores at temperature 1 only, not {request.temperature:g}")
        return await self._score(request, top_k)

    async def _find(self, deadline: float) -> Capabilities:
        ids = self._tokenizer.encode(PLAIN_TEXT, add_special_tokens=False)
        self._dialect = dialect = await discover(self._server, ids, self._settings.request_fields, deadline)
        scores = dialect.scoring is not None
        reads_text = not dialect.token_id_prompts and dialect.chat_length_key is None
        if dialect.keyed_by_text or reads_text:
            self._texts = TokenTexts(self._tokenizer, self._files.vocab_size)
        measured = await self._measure_noise(np.array(ids, dtype=np.int32), deadline) if scores else 0.0
        noise = self._settings.logprob_noise_nats
        self._noise_nats = measured if noise is None else noise
        context = self._files.max_context_tokens
        if dialect.max_context_tokens is not None:  # to score a text, an endpoint also generates one token
            context = min(context, dialect.max_context_tokens - int(scores))
        named_by_id = dialect.sampled_token_ids and not dialect.keyed_by_text
        return Capabilities(
            model=dialect.model,
            vocab_size=self._files.vocab_size,
            vocab_fingerprint=self._files.vocabulary.fingerprint,
            max_context_tokens=context,
            max_top_k=dialect.max_top_k,
            max_generation_top_k=dialect.max_top_k if named_by_id else 0,
            exact_entropy=False,
            candidate_logprobs="none",
            weight_update=False,
            token_id_prompts=dialect.token_id_prompts,
            every_position=dialect.token_id_prompts and not dialect.keyed_by_text,
            abort=False,  # it is not known whether the server stops work on an abandoned request
            sampled_token_ids=dialect.sampled_token_ids,
            seeds=False,  # it may honour them or ignore them: the check of a run sees which
            logprob_noise_nats=self._noise_nats,
            score_temperature=dialect.score_temperature,
            generation_temperature=dialect.generation_temperature,
            server=dialect.description,
            unscored=dialect.unscored,
        )

    async def _measure_noise(self, ids: IntArray, deadline: float) -> float:
        """Measure the noise, in nats, between scores of one text, asked alone and several times at once."""
        half = len(ids) // 2

        async def read() -> TokenScores:
            request = ScoreRequest(ids[:half], ids[half:], temperature=1.0, deadline=deadline)
            return await self._score(request, 0)

        first = await read()
        if not first.known_rows.any():
            raise ConfigError(
                f"{self._role}.backend.url: the endpoint tokenises text otherwise than {self._role}.model "
                f"({self._files.directory}): not one token of a plain sentence is the same; name its own model there"
            )
        others = await gather_answers(read() for _ in range(NOISE_READINGS))
        return noise_nats([np.ptp([each.logprobs for each in (first, *others)], axis=0)])

    async def _score(self, request: ScoreRequest, top_k: int) -> TokenScores:
        dialect, texts, prompt_tokens = self._dialect, self._texts, len(request.prompt_ids)
        ids = request.token_ids.astype(np.int32)
        sent = None if dialect.token_id_prompts or texts is None else as_text(ids, texts)
        served_k = max(top_k, min(self._settings.top_k or DEFAULT_TOP_K, dialect.max_top_k))
        body = dialect.score_body(
            ids.tolist() if sent is None else self._without_start(sent.text, ids),
            served_k,
            temperature=request.temperature,
        )

        def decode(reply: bytes) -> Steps[TokenScores]:
            rows = self._rows(_completion.decode(reply), None if sent is not None else ids.tolist())
            if sent is None:
                at = np.arange(prompt_tokens, len(ids), dtype=np.int32)
            else:
                assert texts is not None
                aligned = align(sent, rows.token_ids, texts)
                at = aligned.same[prompt_tokens:]
            scores = yield from token_scores(
                rows,
                at,
                served_k=served_k,
                top_k=top_k,
                texts=texts if dialect.keyed_by_text else None,
                vocab_size=self._files.vocab_size,
                noise_nats=self._noise_nats,
            )
            check_scores(scores, request.response_ids, top_k=top_k, vocab_size=self._files.vocab_size)
            # A policy that asks for rows gets them where the server's token is ours, and nothing elsewhere.
            return scores if sent is None or top_k else with_chunks(scores, aligned, rows, prompt_tokens)

        return await self._server.ask_in_steps(
            COMPLETIONS, self._with_fields(body), decode, deadline=request.deadline, size=request_size(body, len(ids))
        )

    def _rows(self, reply: Completion, sent_ids: list[int] | None) -> PromptRows:
        """Return the rows of the prompt, which was sent as `sent_ids`, or as text if that is None."""
        dialect, choice = self._dialect, reply.only
        check_not_aborted(self._role, choice.finish_reason)
        if dialect.scoring == "prompt_logprobs":
            return prompt_rows(choice, sent_ids)
        tokens = None if sent_ids is None else len(sent_ids)
        if tokens is None and dialect.scoring == "echo_and_generate" and choice.logprobs is not None:
            tokens = reply.prompt_tokens if reply.prompt_tokens is not None else len(choice.logprobs.tokens) - 1
        rows = echoed_rows(choice, self._texts if dialect.keyed_by_text else None, tokens=tokens)
        if sent_ids is not None:
            differ = [read for read, ours in zip(rows.token_ids, sent_ids, strict=True) if read not in (UNKNOWN, ours)]
            if differ:
                raise PoisonedReplyError(f"echoed {len(differ)} other tokens than were sent")
        return rows

    async def _complete(
        self, prompt_ids: IntArray, sampling: SamplingSettings, top_k: int, deadline: float
    ) -> Generation:
        dialect = self._dialect
        prompt = prompt_ids.tolist() if dialect.token_id_prompts else self._prompt_text(prompt_ids)
        body = dialect.generate_body(prompt, sampling, self._tokenizer, top_k=top_k)
        bias = {} if self._refuses_bias else logit_bias(sampling, self._files.vocab_size, OPENAI_BAN)

        def decode(reply: bytes) -> Generation:
            choice = _completion.decode(reply).only
            if not dialect.sampled_token_ids:
                return self._retokenized(choice.text or "", choice.finish_reason, sampling)
            made = generation(self._role, choice, sampling, top_k=top_k)
            check_end(self._role, made, sampling)
            return check_generation(made, sampling, top_k=top_k, vocab_size=self._files.vocab_size)

        async def ask(body: Mapping[str, Any]) -> Generation:
            size = request_size(body, len(prompt_ids))
            return await self._server.ask(COMPLETIONS, self._with_fields(body), decode, deadline=deadline, size=size)

        if not (bias and dialect.sampled_token_ids):  # text cannot contain ids without a token
            return await ask(body)
        try:
            return await ask({**body, **bias})
        except UnsupportedError:
            reply = await ask(body)  # left-out ids are hardly ever sampled, and a reply with one is refused
        self._refuses_bias = True
        return reply

    async def _chat(self, prompt_ids: IntArray, sampling: SamplingSettings, deadline: float) -> Generation:
        body = self._dialect.chat_body(user_message(self._role, self._tokenizer, prompt_ids), sampling)

        def decode(reply: bytes) -> Generation:
            choice = _chat_reply.decode(reply).only
            return self._retokenized(choice.message.content or "", choice.finish_reason, sampling)

        return await self._server.ask(
            CHAT, self._with_fields(body), decode, deadline=deadline, size=request_size(body, len(prompt_ids))
        )

    def _retokenized(self, text: str, finish_reason: str | None, sampling: SamplingSettings) -> Generation:
        ends = (*self._files.vocabulary.end_token_ids, *sampling.stop_token_ids)
        end = next(each for each in ends if each in sampling.stop_token_ids)
        made = retokenized(self._role, text, finish_reason, sampling, self._tokenizer, end)
        return check_generation(made, sampling, top_k=0, vocab_size=self._files.vocab_size, is_retokenized=True)

    def _prompt_text(self, prompt_ids: IntArray) -> str:
        assert self._texts is not None
        sent = as_text(prompt_ids, self._texts)
        if (sent.spans < 0).any():
            raise PermanentError(
                f"{self._server.section} takes text only, which cannot carry all tokens of this prompt"
            )
        meant = Counter(self._texts.bytes_of[token_id] for token_id in prompt_ids.tolist())
        if spelt := [each for each in self._texts.special_texts if sent.content.count(each) > meant[each]]:
            raise PermanentError(
                f"{self._server.section} takes text only, and would read what this prompt spells in letters, "
                f"{spelt[0].decode()!r}, as the token: use an endpoint that takes token ids"
            )
        return self._without_start(sent.text, prompt_ids)

    def _without_start(self, text: str, ids: IntArray) -> str:
        """Return the text without the start token, if the endpoint itself puts one before every text."""
        start = self._tokenizer.bos_token_id
        if not self._dialect.prepends_start or start is None or not len(ids) or ids[0] != start:
            return text
        return text.removeprefix(self._tokenizer.convert_ids_to_tokens(start))

    def _with_fields(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._settings.request_fields, **body}

    def _limits(self, found: Capabilities, max_top_k: int) -> RequestLimits:
        """What the endpoint takes. More would make some crash, cut the text silently, or answer with gaps."""
        vocab_size = self._files.vocab_size
        return RequestLimits(self._server.section, vocab_size, found.max_context_tokens, max_top_k, "context")
