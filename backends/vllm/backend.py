"""The backend for vLLM servers, 0.16 and later.

`client.py` sends requests and reads replies, `vllm_discovery.py` finds out what a server can do, and `weights.py` sends
weights. Here replies become generations, scores and candidates, with versions and entropies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import structlog

from spot_async.errors import ConfigError, PermanentError, VersionMismatchError
from spot_async.types import (
    Capabilities,
    FinishReason,
    FloatArray,
    Generation,
    IntArray,
    SamplingSettings,
    ScoredPositions,
    ScoreRequest,
    TokenScores,
    WeightSnapshot,
    WeightVersion,
)

from ..shared.held_weights import INITIAL, NamedSpan, ReadName, version_spans
from ..shared.launch_settings import LaunchSettings
from ..shared.remote import RemoteServer, ServerKind, gather_some
from ..shared.replies import bounded_scores, check_candidates, check_generation, scored_positions
from ..shared.request_limits import RequestLimits, logit_bias, prefixes
from ..shared.settings import StudentServerSettings
from ..shared.student_backend import Part, StudentBackend
from . import process
from .client import SINGLE_REQUESTS, Sampled, VllmClient, chosen_at_once, chosen_singly, read_error
from .lora import VllmLora, check_flags
from .process import PACKAGE, Uses, vllm_command
from .transfer import make_updater, transfer_config
from .vllm_discovery import SAYINGS, Found, discover

LAUNCHED_MAX_LOGPROBS = 64


class VllmBackend(StudentBackend):
    """A `Generator`, `Scorer`, `PositionScorer`, `CandidateScorer`, `WeightSink` and `Sleeper`, if its server can."""

    SAYINGS = SAYINGS

    class Settings(StudentServerSettings):
        PACKAGE = PACKAGE
        kind: str = "vllm"

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        is_student = settings.takes_weights(role)
        launch = settings.where if isinstance(settings.where, LaunchSettings) else None
        is_exposed = is_student or settings.sleeps
        if is_exposed and launch is not None and launch.port is not None and not launch.is_elsewhere:
            raise ConfigError(
                f"{role}.backend.launch.port={launch.port}: vLLM asks for no key before it takes weights or sleeps, so "
                f"every user of the machine could replace the {role} there: remove it, for a private socket"
            )
        uses = Uses(
            # One more than is asked for, because the sampled token may take one of a position's places.
            max_logprobs=max(LAUNCHED_MAX_LOGPROBS, settings.top_k or 0) + 1,
            takes_weights=is_student,
            sleeps=settings.sleeps,
            weight_transfer=transfer_config(settings.weights),
            adapters=settings.adapters(role),
        )
        kind = ServerKind(functools.partial(vllm_command, uses=uses), read_error=functools.partial(read_error, role))
        server = RemoteServer(settings, role=role, model=model, run_directory=run_directory, kind=kind)
        self._client = VllmClient(server)
        super().__init__(settings, server, VllmLora(self._client), run_directory)
        self._updater = make_updater(server, settings.weights, run_directory=run_directory)
        self._singles = asyncio.Semaphore(SINGLE_REQUESTS)  # places of requests for single positions or tokens
        self._found: Found

    async def _discover(self, stack: contextlib.AsyncExitStack, deadline: float) -> None:
        if (self._is_student or self._settings.sleeps) and self._server.is_elsewhere:
            structlog.get_logger().warning("vLLM asks for no key before it takes weights", server=self._server.url)
        stack.push_async_callback(self._updater.close)
        self._found = await self._server.alongside(discover(self._client, deadline=deadline))
        self._names.start(self._found.weights)
        if self._settings.sleeps:
            await process.check_can_sleep(self._server, deadline=deadline)
        if self._adapters is not None:
            if self._settings.is_attached:
                await check_flags(self._client, self._adapters.lora, deadline=deadline)
        elif self._is_student and not self._found.offers.weight_update:
            structlog.get_logger().warning("takes no weights", role=self._name, needs=self._found.offers.weights_need)
        elif self._is_student and not self._settings.is_attached:
            await self._updater.name(str(INITIAL), deadline=deadline)
            self._names.start(str(INITIAL))
            await self._updater.witnesses.learn(self._server.files.directory, deadline=deadline)

    async def capabilities(self, *, deadline: float) -> Capabilities:
        """Return what discovery found when the backend was entered, for this role and what it holds now."""
        takes_weights = self._takes_weights
        return msgspec.structs.replace(
            self._found.offers,
            max_context_tokens=self._max_context_tokens,
            weight_update=takes_weights,
            weights_need=self._found.offers.weights_need if self._is_student and not takes_weights else "",
            in_flight_updates=takes_weights,  # no server that names its weights does without
            weight_transport=self._settings.weights.transport if takes_weights else None,
            weights_checked=self._updater.witnesses.are_there if self._adapters is None else False,
            version=None if takes_weights and self._settings.is_attached and self._adapters is None else INITIAL,
        )

    @property
    def _takes_weights(self) -> bool:
        if self._settings.weights.transport == "adapter":
            return self._adapters is not None
        return self._is_student and self._found.offers.weight_update

    @contextlib.contextmanager
    def _asking(self, expected: WeightVersion | None = None) -> Iterator[tuple[VllmClient, ReadName]]:
        """Give the client for one request, and what reads the names of weights in its reply."""
        with self._asked_of(expected) as (adapter, names):
            yield self._client if adapter is None else dataclasses.replace(self._client, model=adapter), names

    @property
    def _max_context_tokens(self) -> int:
        """The context, less one: vLLM always samples a token, also after a sequence to score."""
        is_batched = self._found.offers.candidate_logprobs == "batched"
        scores = not self._is_student or is_batched or self._adapters is not None
        return self._found.offers.max_context_tokens - scores

    @property
    def _limits(self) -> RequestLimits:
        offers = self._found.offers
        return RequestLimits(
            self._name,
            offers.vocab_size,
            offers.max_context_tokens,
            offers.max_top_k,
            "--max-model-len",
            "--max-logprobs",
        )

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        self._limits.check_generation(prompt_ids, new_tokens=sampling.max_tokens, top_k=top_k)
        parameters: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **dict(sampling.further),
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # so that only the given tokens end a response
            **logit_bias(sampling, vocab_size := self._server.files.vocab_size),
        }

        def make(reply: Sampled) -> Generation:
            generation = Generation(
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
                finish_reason=cast(FinishReason, reply.finish_reason),
                version_spans=version_spans(names, reply.spans, len(reply.token_ids)),
                topk_ids=reply.topk_ids if top_k else None,
                topk_logprobs=reply.topk_logprobs if top_k else None,
            )
            return check_generation(generation, sampling, top_k=top_k, vocab_size=vocab_size)

        with self._asking() as (client, names):
            return await client.sample_as(
                make,
                prompt_ids.tolist(),
                parameters,
                top_k=top_k,
                logprobs=min(top_k + 1, vocab_size) if top_k else 0,
                deadline=deadline,
            )

    async def score(
        self, request: ScoreRequest, *, top_k: int, expected_version: WeightVersion | None = None
    ) -> TokenScores:
        """Score a response. The temperature must be 1, because vLLM scores given tokens at no other."""
        self._check_temperature_is_1(request.temperature)
        if not len(request.prompt_ids):
            raise PermanentError(f"{self._name}: prompt_ids is empty: the first response token has nothing before it")
        # vLLM always samples a token, so there must be room for one.
        self._limits.check(request.token_ids, new_tokens=1, top_k=top_k)
        vocab_size = self._server.files.vocab_size
        served_k = max(top_k, min(self._settings.top_k or 0, self._found.offers.max_top_k))
        changes, version = self._changes, INITIAL
        with self._asking(expected_version) as (client, names):

            def check(spans: Sequence[NamedSpan]) -> None:
                nonlocal version
                version = version_spans(names, spans, 1)[0].version or INITIAL

            scored = await client.score(
                request.prompt_ids.tolist(),
                request.response_ids.tolist(),
                top_k=served_k,
                check=check,
                deadline=request.deadline,
            )
        self._check_unchanged(changes, expected_version, "a response was")
        return bounded_scores(*scored, top_k=top_k, vocab_size=vocab_size, version=version)

    def _check_unchanged(self, changes: int, expected: WeightVersion | None, what: str) -> None:
        """Raise `VersionMismatchError` if weights were loaded since there were so many `changes`.

        A reply names only the weights of the token after its rows. What is asked during an update may still be answered
        in part by the weights before.
        """
        if changes != self._changes:
            raise VersionMismatchError(
                f"{self._name}: the weights changed while {what} scored", may_pass=expected is None
            )

    async def score_at(self, request: ScoreRequest, positions: IntArray, *, top_k: int) -> ScoredPositions:
        """Score single positions, with one request for each.

        vLLM serves a wide top-k of tokens that it samples. Of a prompt it would serve one for all tokens or none.
        """
        self._check_temperature_is_1(request.temperature)
        with self._asking() as (client, _):
            asked = (
                functools.partial(client.distribution, prefix, top_k=top_k, deadline=request.deadline)
                for prefix in prefixes(request, positions)
            )
            rows = await gather_some(asked, self._singles)
        tops = ((row.topk_ids, row.topk_logprobs) for row in rows)
        return scored_positions(tops, top_k=top_k, vocab_size=self._server.files.vocab_size)

    async def candidate_logprobs(
        self,
        request: ScoreRequest,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        expected_version: WeightVersion | None,
    ) -> FloatArray:
        """Score candidates. The temperature must be 1, at which the student's own log-probabilities are."""
        self._check_temperature_is_1(request.temperature)
        if not candidate_ids.size:
            return np.zeros(candidate_ids.shape, np.float32)
        self._limits.check_positions(positions, request.response_ids)
        self._limits.check_ids(candidate_ids)
        support = self._found.offers.candidate_logprobs
        if support == "none":
            raise ConfigError(
                f"{self._server.section}: no log-probabilities of chosen tokens with --logprobs-mode "
                "processed_logprobs: start the server without it"
            )
        changes = self._changes
        with self._asking(expected_version) as (client, names):

            def check(replies: Iterable[Sequence[NamedSpan]]) -> None:
                versions = [each.version for spans in replies for each in version_spans(names, spans, 1)]
                self._names.require(versions, expected_version)

            if support == "batched":
                logprobs = await chosen_at_once(client, request, positions, candidate_ids, check=check)
            else:
                contexts = prefixes(request, positions)
                top_k = self._found.offers.max_top_k
                logprobs = await chosen_singly(
                    client, self._singles, contexts, candidate_ids, top_k=top_k, check=check, deadline=request.deadline
                )
        if support == "batched":
            self._check_unchanged(changes, expected_version, "candidates were")
        check_candidates(logprobs, candidate_ids)
        return logprobs

    async def _replace_weights(self, snapshot: WeightSnapshot, deadline: float) -> None:
        if not self._found.offers.weight_update:
            needs = self._found.offers.weights_need
            raise ConfigError(f"{self._server.section}: the server takes no weights: it needs {needs}")
        await self._updater.update(snapshot, deadline=deadline)

    async def _sleep(self, deadline: float) -> None:
        await self._server.ask("/sleep?level=1", None, bytes, deadline=deadline)
        await process.confirm_sleep(self._server, is_sleeping=True, deadline=deadline)

    async def _wake(self, part: Part, deadline: float) -> None:
        await self._server.ask(f"/wake_up?tags={part}", None, bytes, deadline=deadline)
        if part == "kv_cache":
            await process.confirm_sleep(self._server, is_sleeping=False, deadline=deadline)

    async def _ask_engine(self, deadline: float) -> None:
        with self._asking() as (client, names):
            await process.ask_engine(client, names, deadline=deadline)
