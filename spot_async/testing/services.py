"""Simulates student, teacher, verifier and trainer: real shapes, seeded numbers, stated latencies.

They are for tests of the orchestrator on virtual time. An answer depends on the request and on the weights' version,
never on when the request came. They check what real services would: that versions match, that positions are inside the
response, and that no sample is trained twice.

At the end are makers of replies: responses, scores, capabilities. A test gives only what it is about.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.base.tasks import Opened
from spot_async.errors import VersionMismatchError
from spot_async.terms import policy_tokens
from spot_async.types import (
    Capabilities,
    FinishReason,
    Float64Array,
    FloatArray,
    Generation,
    IntArray,
    Live,
    LiveRows,
    Problem,
    SamplingSettings,
    ScoreRequest,
    Supervision,
    TokenScores,
    TrainReport,
    Verdict,
    VersionSpan,
    WeightFile,
    WeightSnapshot,
    WeightVersion,
)

VOCAB_SIZE = 64
END_TOKEN = 1
INITIAL_VERSION = WeightVersion(0, 0)


@dataclass(frozen=True)
class Latency:
    """The seconds of a request: a constant and a part per token, stretched by up to `spread`, as its seed decides."""

    base_s: float = 0.02
    per_token_s: float = 0.001
    spread: float = 1.0

    def of(self, tokens: int, rng: np.random.Generator) -> float:
        return (self.base_s + self.per_token_s * tokens) * (1.0 + self.spread * float(rng.random()))


def rng_of(*parts: object) -> np.random.Generator:
    """Return a generator that these parts decide."""
    return np.random.Generator(np.random.PCG64(zlib.crc32(repr(parts).encode())))


def sampled_tokens(
    rng: np.random.Generator, sampling: SamplingSettings, mean_tokens: int, vocab_size: int, end_token: int
) -> IntArray:
    """Return a response of random length that ends with the end token, unless it is as long as it may be."""
    length = int(min(sampling.max_tokens, 1 + rng.geometric(1 / mean_tokens)))
    token_ids = rng.integers(2, min(vocab_size, sampling.vocab_limit or vocab_size), length, dtype=np.int32)
    for stop in sampling.stop_token_ids:
        token_ids[token_ids == stop] = 0  # nothing ends it before
    if length < sampling.max_tokens:
        token_ids[-1] = end_token
    return token_ids


def with_topk(found: Generation, top_k: int, vocab_size: int) -> Generation:
    """Return a response with the top-k at each token, if one was asked for."""
    if not top_k:
        return found
    ranks = np.arange(min(top_k, vocab_size))
    ids = (found.token_ids[:, None] + ranks) % vocab_size  # the sampled token is the likeliest
    lower = found.logprobs[:, None] - 5 * ranks
    return msgspec.structs.replace(found, topk_ids=ids.astype(np.int32), topk_logprobs=lower.astype(np.float32))


def finish_reason(token_ids: IntArray, end_token: int) -> FinishReason:
    return "stop" if token_ids[-1] == end_token else "length"


def any_lineage(version: WeightVersion) -> WeightVersion:
    """Return what answers depend on: a resumed run has the same weights again, under the name of another lineage."""
    return WeightVersion(0, version.step)


@dataclass
class SimulatedStudent:
    """A simulated student: generator, candidate scorer and weight sink in one, like the local backend."""

    latency: Latency = field(default_factory=Latency)
    mean_tokens: int = 40
    version: WeightVersion = INITIAL_VERSION
    requests: int = 0
    vocab_size: int = VOCAB_SIZE
    end_token: int = END_TOKEN
    told_others: bool = False  # it was asked for log-probabilities of other tokens than it sampled

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        self.requests += 1
        self.told_others |= top_k > 0
        version = self.version
        rng = rng_of(sampling.seed, any_lineage(version))
        token_ids = sampled_tokens(rng, sampling, self.mean_tokens, self.vocab_size, self.end_token)
        await self._work(len(token_ids), rng)
        logprobs = -rng.random(len(token_ids), dtype=np.float32)
        reason = finish_reason(token_ids, self.end_token)
        found = generation(token_ids, logprobs, version=version, finish_reason=reason)
        return with_topk(found, top_k, self.vocab_size)

    async def candidate_logprobs(
        self,
        request: ScoreRequest,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        expected_version: WeightVersion | None,
    ) -> FloatArray:
        self.requests += 1
        self.told_others = True
        version = self.version
        if expected_version not in (None, version):
            raise VersionMismatchError(f"the server holds {version}, not {expected_version}")
        if len(positions) and int(positions.max()) >= len(request.response_ids):
            raise ValueError("position outside the response")
        rng = rng_of(
            "candidates", request.prompt_ids.tobytes() + request.response_ids.tobytes(), any_lineage(self.version)
        )
        await self._work(0, rng)
        if version != self.version:
            raise VersionMismatchError(f"the server has got {self.version} meanwhile", may_pass=True)
        logits = rng.normal(size=candidate_ids.shape)
        return np.asarray(logits - 1.0 - np.log(np.exp(logits).sum(-1, keepdims=True)), dtype=np.float32)

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        await asyncio.sleep(self.latency.base_s)
        self.version = snapshot.version

    async def _work(self, tokens: int, rng: np.random.Generator) -> None:
        await asyncio.sleep(self.latency.of(tokens, rng))


@dataclass
class SimulatedTeacher(SimulatedStudent):
    """A simulated teacher: a scorer with exact entropy, which also writes responses. Others score otherwise."""

    name: str = ""

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        return whole_scores(await self._rows(request), request.response_ids, top_k)

    async def candidate_logprobs(
        self,
        request: ScoreRequest,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        expected_version: WeightVersion | None,
    ) -> FloatArray:
        rows = await self._rows(request)
        return rows[positions[:, None], candidate_ids].astype(np.float32)

    async def _rows(self, request: ScoreRequest) -> Float64Array:
        """Return the whole distributions (T, V) of the response's tokens."""
        rng = rng_of(f"teacher{self.name}", request.prompt_ids.tobytes() + request.response_ids.tobytes())
        await self._work(len(request.response_ids), rng)
        logits = rng.normal(scale=2.0, size=(len(request.response_ids), self.vocab_size))
        rows: Float64Array = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return rows


@dataclass
class SimulatedVerifier(Opened):
    """A simulated verifier, which finds `share_correct` of the responses correct, depending on their text."""

    latency_s: float = 0.002
    share_correct: float = 0.4

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        await asyncio.sleep(self.latency_s)
        return Verdict.CORRECT if rng_of(problem.id, response_text).random() < self.share_correct else Verdict.WRONG


@dataclass
class SimulatedTrainer:
    """A simulated trainer: keeps the batches for inspection, and publishes a new version for each.

    Its snapshots name files that nobody reads. With a `directory` they always name that one.
    """

    step_s: float = 1.0
    directory: str | None = None
    batches: list[list[Supervision]] = field(default_factory=list)
    save_s: float = 0.5
    vocab_size: int = VOCAB_SIZE

    async def look(self, iteration: int, batch: Sequence[Supervision]) -> Sequence[Live]:
        return [simulated_live(each, self.vocab_size) for each in batch]

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        if iteration != len(self.batches):
            raise ValueError(f"iteration {iteration} after {len(self.batches)} batches")
        await asyncio.sleep(self.step_s)
        self.batches.append(list(batch))
        directory = self.directory or f"weights/{iteration + 1}"
        snapshot = WeightSnapshot(directory=directory, version=WeightVersion(0, iteration + 1))
        return TrainReport(snapshot=snapshot, metrics={"loss": 0.0} if batch else {})

    async def published(self, step: int) -> tuple[WeightFile, ...]:
        return ()

    async def save(self, step: int, directory: str) -> None:
        if step != len(self.batches):
            raise ValueError(f"step {step} is saved after {len(self.batches)} batches")

    async def saved(self, step: int) -> float:
        await asyncio.sleep(self.save_s)
        return self.save_s


def simulated_live(sample: Supervision, vocab_size: int = VOCAB_SIZE) -> Live:
    """Return what a simulated student says: of sampled tokens what was served, and that all tokens are as likely.

    Its entropies differ by token, so that a policy which goes by them can be tested.
    """
    where = policy_tokens(sample)
    nats = np.log(vocab_size) * np.abs(np.sin(1.0 + sample.response_ids))
    known = [np.where(where, each, np.nan).astype(np.float32) for each in (sample.behavior_logprobs, nats)]
    rows = []
    for targets in sample.soft_targets:
        others = max(vocab_size - targets.token_ids.shape[1], 1e-3)
        even = np.full(targets.token_ids.shape, -np.log(vocab_size), np.float32)
        rows.append(LiveRows(logprobs=even, tail_logprobs=np.full(len(even), np.log(others / vocab_size), np.float32)))
    return Live(logprobs=known[0], entropy=known[1], where=where, rows=tuple(rows))


def generation(
    token_ids: Sequence[int] | IntArray,
    logprobs: npt.ArrayLike | None = None,
    *,
    version: WeightVersion = INITIAL_VERSION,
    finish_reason: FinishReason = "stop",
) -> Generation:
    """Make a response of one weight version. Its log-probabilities are 0 by default."""
    tokens = len(token_ids)
    return Generation(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.asarray(np.zeros(tokens) if logprobs is None else logprobs, np.float32),
        finish_reason=finish_reason,
        version_spans=(VersionSpan(0, tokens, version),),
    )


def token_scores(
    logprobs: npt.ArrayLike,
    *,
    entropy: npt.ArrayLike = 0.0,
    topk_ids: npt.ArrayLike = 0,
    topk_logprobs: npt.ArrayLike = 0.0,
    **changes: Any,
) -> TokenScores:
    """Make a teacher's scores with exact entropies. A single value holds for all tokens."""
    own = np.asarray(logprobs, np.float32)
    nats = np.broadcast_to(entropy, own.shape).astype(np.float32)
    shape = (len(own), np.shape(topk_ids)[-1] if np.ndim(topk_ids) else 1)
    scores = {
        "logprobs": own,
        "topk_ids": np.broadcast_to(topk_ids, shape).astype(np.int32),
        "topk_logprobs": np.broadcast_to(topk_logprobs, shape).astype(np.float32),
        "entropy": nats,
        "entropy_lower": nats,
        "entropy_upper": nats,
        "version": INITIAL_VERSION,
    }
    return TokenScores(**{**scores, **changes})


def whole_scores(logprobs: Float64Array, response_ids: IntArray, top_k: int) -> TokenScores:
    """Make the scores of a response from the whole distribution of each of its tokens, `logprobs` (T, V)."""
    order = np.argsort(-logprobs, axis=-1)[:, :top_k]
    others = logprobs.copy()
    np.put_along_axis(others, order, -np.inf, axis=-1)
    return token_scores(
        logprobs[np.arange(len(response_ids)), response_ids],
        entropy=-(np.exp(logprobs) * logprobs).sum(-1),
        topk_ids=order,
        topk_logprobs=np.take_along_axis(logprobs, order, -1),
        tail_logprobs=np.logaddexp.reduce(others, axis=-1).astype(np.float32),
    )


def capabilities(vocab_size: int, **changes: Any) -> Capabilities:
    """Make the capabilities of our own server: whole distributions, batched candidates, and weight updates."""
    return Capabilities(
        **{
            "model": "simulated",
            "vocab_size": vocab_size,
            "vocab_fingerprint": "simulated",
            "max_context_tokens": 1 << 20,
            "max_top_k": vocab_size,
            "exact_entropy": True,
            "candidate_logprobs": "batched",
            "weight_update": True,
            "in_flight_updates": True,
            **changes,
        }
    )
