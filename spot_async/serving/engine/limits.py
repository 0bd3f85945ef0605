"""Refuses requests that the engine cannot answer before they reach it, each with one clear line."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from spot_async.errors import PermanentError
from spot_async.serving.api import CandidateRequest, EngineRequest, GenerateRequest, ScoreRequest

MAX_TOP_K = 1024


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the served model accepts. `check` raises `PermanentError` for any other request."""

    vocab_size: int
    max_context_tokens: int

    @property
    def max_top_k(self) -> int:
        return min(MAX_TOP_K, self.vocab_size)

    def check(self, request: EngineRequest) -> None:
        match request:
            case GenerateRequest():
                self._check_generate(request)
            case ScoreRequest():
                self._check_sequence(request)
                self._check_top_k(request.top_k)
            case CandidateRequest():
                self._check_sequence(request)
                self._check_candidates(request)

    def _check_generate(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        self._check_ids("prompt_ids", request.prompt_ids, ndim=1)
        self._check_prompt(request.prompt_ids)
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            message = "must be a number above 0, or 0 for the likeliest token"
            raise PermanentError(f"temperature={sampling.temperature}: {message}")
        self._check_top_k(request.top_k)
        if not 0 < sampling.top_p <= 1:
            raise PermanentError(f"top_p={sampling.top_p}: must be above 0 and at most 1")
        if sampling.further:
            raise PermanentError(f"{', '.join(dict(sampling.further))}: the local engine has none: leave it out")
        if sampling.max_tokens < 1:
            raise PermanentError(f"max_tokens={sampling.max_tokens}: must be at least 1")
        if sampling.seed < 0:
            raise PermanentError(f"seed={sampling.seed}: must not be negative")
        if sampling.vocab_limit is not None and sampling.vocab_limit < 1:
            raise PermanentError(f"vocab_limit={sampling.vocab_limit}: must be at least 1")
        for token in sampling.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise PermanentError(f"stop_token_ids holds {token}: the vocabulary has {self.vocab_size} tokens")
        self._check_length(len(request.prompt_ids), sampling.max_tokens, "max_tokens")

    def _check_candidates(self, request: CandidateRequest) -> None:
        self._check_ids("candidate_ids", request.candidate_ids, ndim=2)
        positions, length = request.positions, len(request.response_ids)
        if positions.ndim != 1 or positions.dtype.kind != "i" or len(positions) != len(request.candidate_ids):
            raise PermanentError("positions: must be (N,) integers for candidate_ids (N, k)")
        if not request.candidate_ids.size:
            raise PermanentError("candidate_ids is empty: there is nothing to score")
        if not (positions.min() >= 0 and positions.max() < length):
            raise PermanentError(f"positions: must lie in the response's {length} tokens")

    def _check_sequence(self, request: ScoreRequest | CandidateRequest) -> None:
        self._check_ids("prompt_ids", request.prompt_ids, ndim=1)
        self._check_ids("response_ids", request.response_ids, ndim=1)
        self._check_prompt(request.prompt_ids)
        if not len(request.response_ids):
            raise PermanentError("response_ids is empty: there is nothing to score")
        self._check_temperature(request.temperature)
        self._check_length(len(request.prompt_ids), len(request.response_ids), "response")

    def _check_ids(self, name: str, ids: npt.NDArray[np.int32], *, ndim: int) -> None:
        if ids.dtype.kind != "i" or ids.ndim != ndim:
            raise PermanentError(f"{name}: must be integers with {ndim} axes, not {ids.dtype} with {ids.ndim}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise PermanentError(f"{name} holds {wrong}: the vocabulary has {self.vocab_size} tokens")

    def _check_prompt(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        if not len(prompt_ids):
            raise PermanentError("prompt_ids is empty: give at least one token, such as the begin token")

    def _check_temperature(self, temperature: float) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise PermanentError(f"temperature={temperature}: must be a number above 0")

    def _check_top_k(self, top_k: int) -> None:
        if not 0 <= top_k <= self.max_top_k:
            raise PermanentError(f"top_k={top_k}: must be from 0 to {self.max_top_k}")

    def _check_length(self, prompt: int, response: int, what: str) -> None:
        if prompt + response > self.max_context_tokens:
            raise PermanentError(
                f"{prompt} prompt tokens + {response} ({what}) exceed the context of {self.max_context_tokens} tokens: "
                "shorten them or raise the server's max_context_tokens"
            )
