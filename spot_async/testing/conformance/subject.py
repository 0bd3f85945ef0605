"""Shows checks the backend under check: requests with sensible defaults, and the exact values to compare with.

It holds the reference model and the weights to update to, and judges nothing itself.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spot_async.models.files import ModelFiles
from spot_async.types import (
    Capabilities,
    Float64Array,
    FloatArray,
    Generation,
    IntArray,
    LogprobTemperature,
    SamplingSettings,
    ScoreRequest,
    TokenScores,
    WeightSnapshot,
    WeightVersion,
)

if TYPE_CHECKING:
    from spot_async.testing.conformance.reference import Reference

COOL = 0.6  # a temperature at which log-probabilities differ clearly from those at 1
PROMPT_TOKENS = 12
RESPONSE_TOKENS = 24
LONG_RESPONSE_TOKENS = 2048  # takes much longer than a round trip on any server


@dataclass
class Subject:
    """A running backend under check. `reference` and `version` change when its weights do."""

    backend: Any  # a `protocols.Backend`, with the further protocols that its capabilities say
    capabilities: Capabilities
    files: ModelFiles
    reference: Reference  # computes with the weights being served
    version: WeightVersion | None  # the weights being served; None if that cannot be known
    scratch: Path  # the directory for weights to update to
    tolerance_nats: float = 2e-5
    timeout_s: float = 120.0  # deadline of a request
    device: str = "cpu"  # the reference's
    broken: set[str] = field(default_factory=set)  # checks that failed, or that build on those
    _seeds: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def deadline(self, timeout_s: float | None = None) -> float:
        return asyncio.get_running_loop().time() + (self.timeout_s if timeout_s is None else timeout_s)

    def prompt(self, number: int, length: int = PROMPT_TOKENS) -> IntArray:
        """Return the `number`-th prompt of ordinary tokens.

        If possible, the tokenizer makes the same tokens of the prompt's text, for endpoints that take only text.
        """
        ids = self.tokens(length, seed=1000 + number)
        tokenizer = self.files.vocabulary.tokenizer
        again = tokenizer(tokenizer.decode(ids.tolist()), add_special_tokens=False)["input_ids"]
        stable = len(again) == length and max(again) < self.capabilities.vocab_size
        return np.array(again, np.int32) if stable else ids

    def tokens(self, count: int, seed: int) -> IntArray:
        """Return ids of ordinary tokens, none of them special, (count,)."""
        tokenizer = self.files.vocabulary.tokenizer
        special = {*tokenizer.all_special_ids, *self.end_token_ids}
        size = min(len(tokenizer), self.capabilities.vocab_size)
        ordinary = np.array([token for token in range(size) if token not in special], np.int32)
        return np.random.default_rng(seed).choice(ordinary, count)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens. Every request has them as stop tokens, since some servers stop there anyway."""
        return self.files.vocabulary.end_token_ids

    @property
    def generation_top_k(self) -> int:
        return min(16, self.capabilities.max_generation_top_k)

    @property
    def score_top_k(self) -> int:
        return min(16, self.capabilities.max_top_k)

    @property
    def long_response_tokens(self) -> int:
        return min(LONG_RESPONSE_TOKENS, self.capabilities.max_context_tokens - PROMPT_TOKENS)

    async def generate(
        self,
        prompt_ids: IntArray,
        *,
        top_k: int = 0,
        timeout_s: float | None = None,
        seed: int | None = None,
        **sampled: Any,
    ) -> Generation:
        """Ask for a response to `sampled`, fields of `SamplingSettings`.

        Without a `seed`, the request has one that no other request has.
        """
        seed = next(self._seeds) if seed is None else seed
        own: dict[str, Any] = {"max_tokens": RESPONSE_TOKENS, "stop_token_ids": (), "seed": seed}
        sampling = SamplingSettings(**(own | sampled))
        reply: Generation = await self.backend.generate(
            prompt_ids, sampling, top_k=top_k, deadline=self.deadline(timeout_s)
        )
        return reply

    async def score(
        self, prompt_ids: IntArray, response_ids: IntArray, *, top_k: int | None = None, temperature: float = 1.0
    ) -> TokenScores:
        reply: TokenScores = await self.backend.score(
            ScoreRequest(prompt_ids, response_ids, temperature, self.deadline()),
            top_k=self.score_top_k if top_k is None else top_k,
        )
        return reply

    async def candidates(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        temperature: float = 1.0,
        version: WeightVersion | None = None,
        is_live: bool = False,
    ) -> FloatArray:
        reply: FloatArray = await self.backend.candidate_logprobs(
            ScoreRequest(prompt_ids, response_ids, temperature, self.deadline()),
            positions,
            candidate_ids,
            expected_version=None if is_live else version or self.version or WeightVersion(0, 0),
        )
        return reply

    async def exact(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        *,
        temperature: float = 1.0,
        convention: LogprobTemperature = "request",
    ) -> Float64Array:
        """Return the exact rows (T, V), at the temperature that the served log-probabilities are at."""
        return await self.reference.logprobs(prompt_ids, response_ids, temperature if convention == "request" else 1.0)

    def snapshot(self, directory: Path, version: WeightVersion) -> WeightSnapshot:
        """Return a snapshot with an absolute path, since the server may run in another directory."""
        return WeightSnapshot(directory=str(directory.absolute()), version=version)

    async def update(self, directory: Path, version: WeightVersion) -> None:
        """Send weights, and compare with them from then on."""
        from spot_async.testing.conformance.reference import Reference

        await self.backend.update_weights(self.snapshot(directory, version), deadline=self.deadline())
        self.reference = await asyncio.to_thread(Reference, directory, self.device)
        self.version = version
