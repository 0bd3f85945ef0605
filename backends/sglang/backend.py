"""The backend for SGLang servers, through their native API (`/generate`). Written for 0.5.23; older ones work too.

Requests are checked before they are sent. A token outside the vocabulary, a k above its size or a start before -1 would
crash the whole server. `requests.py` sends them, `replies.py` reads replies, and `weights.py` sends weights.

What callers should know about the server:

* Log-probabilities of generated positions are at the request's temperature and before top-p. Those of given tokens are
  always at temperature 1, so scores are at 1 only.
* To score chosen tokens at a position, we ask for the log-probabilities of what would be generated after the prefix.
  That costs one token, since the prefix is cached, and is at the request's temperature. `token_indices_to_pool` was
  made for this, but it counts from the end of the cached part or of the current chunk. It crashes the server if that is
  not the whole sequence.
* A seed works only under --enable-deterministic-inference, and is ignored otherwise.
* A response also ends at the model's own end tokens. `ignore_eos` would ignore the request's end tokens too.
* A `logit_bias` changes the log-probabilities too; see `generation.py`.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import msgspec
import numpy as np

from spot_async.errors import PermanentError
from spot_async.types import (
    Capabilities,
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

from ..shared.bodies import Steps
from ..shared.discovery import asked_as, compare_tokenizers, differences, is_unknown, noise_nats, temperature_convention
from ..shared.held_weights import ReadName
from ..shared.remote import RemoteServer, ServerKind
from ..shared.replies import bounded_scores, check_candidates, check_rows, scored_positions
from ..shared.request_limits import RequestLimits, prefixes
from ..shared.settings import StudentServerSettings
from ..shared.student_backend import PARTS, Part, StudentBackend
from . import process
from .generation import generate_below
from .process import PACKAGE, sglang_command
from .replies import Scores, read_scores
from .requests import SglangRequests, neutral
from .sglang_discovery import (
    PLAIN_TEXT,
    SAYINGS,
    check_cache,
    check_exact,
    check_ready,
    check_vocabulary,
    server_info,
)
from .weights import ModelInfo, ServerInfo, SglangLora, SglangWeights

READY = "/model_info"  # not /health, which generates a token, takes a second, and fails while the server is paused
DISCOVERY_TOKENS = 32
DISCOVERY_TOP_K = 16


class SglangBackend(StudentBackend):
    """A `Generator`, `Scorer`, `PositionScorer`, `CandidateScorer`, `WeightSink` and `Sleeper` around one server."""

    SAYINGS = SAYINGS

    class Settings(StudentServerSettings):
        PACKAGE = PACKAGE
        kind: str = "sglang"

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        kind = ServerKind(
            functools.partial(sglang_command, sleeps=settings.sleeps, adapters=settings.adapters(role)),
            ready_path=READY,
        )
        server = RemoteServer(settings, role=role, model=model, run_directory=run_directory, kind=kind)
        super().__init__(settings, server, SglangLora(server), run_directory)
        self._log_directory = run_directory / "logs"
        self._vocab_size = server.files.vocab_size
        limits = self._limits_of(server.files.max_context_tokens)
        self._requests = SglangRequests(server, self._asked_of, limits)
        self._updater: SglangWeights
        self._capabilities: Capabilities

    async def _discover(self, stack: contextlib.AsyncExitStack, deadline: float) -> None:
        # vLLM may have a /server_info too, but not the rest.
        async with asked_as(self._server, "SGLang", is_unknown, deadline=deadline):
            info = await server_info(self._server, deadline=deadline)
            self._updater = SglangWeights(self._server, self._settings.weights, info, log_directory=self._log_directory)
            stack.push_async_callback(self._updater.close)
            if not self._settings.is_attached:
                check_cache(self._server, info)
            if self._settings.sleeps:
                process.check_can_sleep(self._server, info)
            self._capabilities = await self._server.alongside(self._found(info, deadline))

    async def capabilities(self, *, deadline: float) -> Capabilities:
        return self._capabilities

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        self._requests.limits.check_generation(prompt_ids, new_tokens=sampling.max_tokens, top_k=top_k)
        return await generate_below(
            self._requests, prompt_ids, sampling, self._vocab_size, top_k=top_k, deadline=deadline
        )

    async def score(
        self, request: ScoreRequest, *, top_k: int, expected_version: WeightVersion | None = None
    ) -> TokenScores:
        self._check_temperature_is_1(request.temperature)
        served_k = max(top_k, min(self._settings.top_k or 1, self._vocab_size))
        found = await self._score(request, served_k, expected_version)
        return bounded_scores(
            found.logprobs,
            *found.top,
            top_k=top_k,
            vocab_size=self._vocab_size,
            version=found.version,
        )

    async def score_at(self, request: ScoreRequest, positions: IntArray, *, top_k: int) -> ScoredPositions:
        self._check_temperature(request.temperature)
        self._requests.limits.check_positions(positions, request.response_ids)
        asked = ((prefix, None) for prefix in prefixes(request, positions))
        found = await self._requests.next_tokens(asked, top_k, request.temperature, request.deadline)
        tops = (each.top for each in found if each.top is not None)
        return scored_positions(tops, top_k=top_k, vocab_size=self._vocab_size)

    async def candidate_logprobs(
        self,
        request: ScoreRequest,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        expected_version: WeightVersion | None,
    ) -> FloatArray:
        if not candidate_ids.size:
            return np.zeros(candidate_ids.shape, np.float32)
        self._check_temperature(request.temperature)
        self._requests.limits.check_ids(candidate_ids)
        self._requests.limits.check_positions(positions, request.response_ids)
        asked = zip(prefixes(request, positions), candidate_ids, strict=True)
        found = await self._requests.next_tokens(asked, 0, request.temperature, request.deadline, expected_version)
        self._names.require([each.version for each in found], expected_version)
        return check_candidates(np.stack([each.chosen for each in found if each.chosen is not None]), candidate_ids)

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        await super().update_weights(snapshot, deadline=deadline)
        self._capabilities = msgspec.structs.replace(self._capabilities, version=snapshot.version)

    async def _replace_weights(self, snapshot: WeightSnapshot, deadline: float) -> None:
        await self._updater.update(snapshot, deadline=deadline)

    async def _sleep(self, deadline: float) -> None:
        # Until no request is left: a server that is sent to sleep before crashes.
        await self._updater.control.flush(deadline)
        await self._server.ask("/release_memory_occupation", {"tags": PARTS}, bytes, deadline=deadline)

    async def _wake(self, part: Part, deadline: float) -> None:
        await self._server.ask("/resume_memory_occupation", {"tags": [part]}, bytes, deadline=deadline)

    async def _ask_engine(self, deadline: float) -> None:
        names = self._names.reader()  # of the base, whatever adapters there are
        await process.ask_engine(self._server, names, deadline=deadline)

    async def _found(self, info: ServerInfo, deadline: float) -> Capabilities:
        """Find out by asking what the server offers."""
        files = self._server.files
        served = info.max_req_input_len  # one more than the server accepts
        max_tokens = min(files.max_context_tokens, served - 1 if served else files.max_context_tokens)
        self._requests.limits = self._limits_of(max_tokens)
        if self._settings.is_attached:
            await check_ready(self._server, deadline=deadline)
        model = await self._server.get(READY, ModelInfo, deadline=deadline)
        self._requests.neutral = neutral(model, info)
        check_exact(self._server, info)
        await check_vocabulary(self._server, info, self._requests.neutral, deadline=deadline)
        self._names.start(model.weight_version)
        # A server without its tokenizer refuses.
        await compare_tokenizers(self._server, [PLAIN_TEXT], deadline=deadline, may_refuse=True)
        prompt_ids = np.array(files.vocabulary.tokenizer.encode(PLAIN_TEXT, add_special_tokens=False), np.int32)
        top_k = min(DISCOVERY_TOP_K, self._vocab_size)
        count = min(DISCOVERY_TOKENS, max_tokens - len(prompt_ids))
        sampling = SamplingSettings(max_tokens=count, stop_token_ids=(), seed=0)
        generated = await self.generate(prompt_ids, sampling, top_k=top_k, deadline=deadline)
        scored = await self._score(ScoreRequest(prompt_ids, generated.token_ids, 1.0, deadline), top_k)
        [halved] = await self._requests.next_tokens([(prompt_ids, None)], top_k, 0.5, deadline)
        assert halved.top is not None
        noise = self._settings.logprob_noise_nats
        if noise is None:
            noise = noise_nats(differences(generated, scored.logprobs, *scored.top))
        attached_student = self._is_student and self._settings.is_attached
        takes_adapters = self._settings.weights.transport == "adapter"
        if self._is_student and not attached_student and not takes_adapters:
            await self._updater.witnesses.learn(self._server.files.directory, deadline=deadline)
        return Capabilities(
            model=str(files.directory),
            vocab_size=self._vocab_size,
            vocab_fingerprint=files.vocabulary.fingerprint,
            max_context_tokens=max_tokens,
            max_top_k=self._vocab_size,
            max_generation_top_k=self._vocab_size,
            max_position_top_k=self._vocab_size,
            exact_entropy=False,
            candidate_logprobs="single",
            weight_update=not takes_adapters or self._adapters is not None,
            in_flight_updates=takes_adapters or self._updater.holds_requests,
            logprob_noise_nats=noise,
            score_temperature="one",
            generation_temperature=temperature_convention(scored.top.logprobs[0], halved.top.logprobs[0]),
            dtype=None if info.dtype == "auto" else info.dtype,
            seeds=info.enable_deterministic_inference,
            prefix_caching=not info.disable_radix_cache,
            weight_transport=self._settings.weights.transport,
            weights_checked=self._updater.witnesses.are_there if not takes_adapters else False,
            version=None if attached_student and self._adapters is None else WeightVersion(0, 0),
            server=f"sglang {info.version}",
        )

    async def _score(self, request: ScoreRequest, top_k: int, expected: WeightVersion | None = None) -> Scores:
        sequence = request.token_ids
        self._requests.limits.check(sequence, top_k=top_k)
        self._requests.limits.check(request.prompt_ids)
        self._requests.limits.check(request.response_ids)
        body = {
            "input_ids": sequence.tolist(),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": len(request.prompt_ids) - 1,  # the first row has none, so start one early
            "top_logprobs_num": top_k,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }

        def read(reply: bytes, names: ReadName) -> Steps[Scores]:
            found = yield from read_scores(reply, names, request.response_ids, vocab_size=self._vocab_size)
            check_rows(request.response_ids, found.logprobs, *found.top, top_k=top_k, vocab_size=self._vocab_size)
            return found

        return await self._requests.ask(body, read, request.deadline, expected)

    def _limits_of(self, max_tokens: int) -> RequestLimits:
        return RequestLimits(self._name, self._vocab_size, max_tokens, self._vocab_size, "--context-length")

    def _check_temperature(self, temperature: float) -> None:
        if temperature != 1.0 and self._capabilities.generation_temperature == "one":
            raise PermanentError(
                f"{self._name}: the server gives log-probabilities at temperature 1, not at {temperature:g}: start it "
                "without SGLANG_RETURN_ORIGINAL_LOGPROB or set sampling.temperature=1"
            )
