"""The values that travel between data, stages, policies and the trainer.

Plain records without behaviour. Those that cross a process boundary are msgspec structs, so that
`base/wire.py` can encode them without pickle; arrays are numpy and never lists of floats.

Conventions, everywhere in this package:
* Response positions are 0-based: position `t` is the decision for `response_ids[t]`
  (the paper's `t` is this plus one). `models/alignment.py` maps positions to model output rows.
* Log-probabilities are natural logs over the full vocabulary, of the untruncated distribution
  at the stated temperature.
* Shapes name their axes: P prompt tokens, T response tokens, K served top-k, N positions,
  k candidates per position.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.config import SamplingConfig

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]  # indices, as numpy makes them
Float64Array = npt.NDArray[np.float64]  # what is computed with

FinishReason = Literal["stop", "length"]


class WeightVersion(NamedTuple):
    """Which weights a token came from. After a roll-back the step repeats, the lineage does not."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """The inverse of `str`; raises ValueError for a version that is not ours."""
        lineage, _, step = text.partition(".")
        return cls(int(lineage), int(step))


class Verdict(StrEnum):
    """What a verifier found. The first three are outcomes, the next two are missing evidence."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNJUDGED = "unjudged"  # the problem has no answer to judge by

    @property
    def reward(self) -> float | None:
        """1, 0 or, where the verifier could not or need not decide, None (method.md section 2)."""
        if self.is_missing or self is Verdict.UNJUDGED:
            return None
        return 1.0 if self is Verdict.CORRECT else 0.0

    @property
    def is_missing(self) -> bool:
        """Whether it is missing evidence, which may be there if it is asked for once more."""
        return self in (Verdict.TIMEOUT, Verdict.ERROR)


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, as chat templates know them."""

    role: str  # system, user or assistant
    content: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a problem file."""

    id: str
    text: str  # in a conversation what the user says last
    answer: str  # with choices the letter of the right one; empty where there is none, or a judge decides
    tier: str | None = None  # group that evaluation tables report apart (difficulty, subject, ...)
    category: str | None = None  # subject or source, by which examples are matched
    choices: tuple[str, ...] = ()  # in the file's order, A first; not part of the text
    solution: str | None = None  # a worked one, where examples are made of it
    history: tuple[ChatTurn, ...] = ()  # what was said before the text: a system message, earlier turns

    @property
    def shown(self) -> str:
        """All that is asked, for people."""
        return "\n".join([*(f"[{turn.role}] {turn.content}" for turn in self.history), self.text])


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A problem at its place in the run."""

    ordinal: int  # place in admission order; seeds and priorities derive from it
    problem: Problem
    token_ids: IntArray  # (P,) the rendered chat prompt


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one request samples. `seed` alone decides its randomness, whatever runs beside it."""

    temperature: float = 1.0  # 0: always the likeliest token, with log-probabilities as the server sees fit
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    # Only ids below it are sampled, None: all. Log-probabilities stay those of the whole softmax, as under top-p.
    vocab_limit: int | None = None


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a response were sampled by `version`."""

    start: int
    end: int
    version: WeightVersion


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled response."""

    token_ids: IntArray  # (T,) the end token included when it was generated
    logprobs: FloatArray  # (T,) of the sampled tokens
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]  # cover [0, T) in order
    # (T, K) when top_k > 0 was asked for. Ids that a `vocab_limit` leaves out may be among them, or may be passed over.
    topk_ids: IntArray | None = None
    topk_logprobs: FloatArray | None = None  # (T, K)


class TokenScores(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a given response under a model. Response rows only."""

    logprobs: FloatArray  # (T,) of the response's own tokens
    topk_ids: IntArray  # (T, K) descending by probability
    topk_logprobs: FloatArray  # (T, K)
    entropy: FloatArray  # (T,) nats; a midpoint where only bounds are known
    entropy_lower: FloatArray  # (T,) equal to entropy when it is exact
    entropy_upper: FloatArray  # (T,)
    version: WeightVersion
    # (T,) false where nothing is known: a server that reads text had tokenised it differently there. Such a row holds
    # finite placeholders that nobody may use. None: all rows are known.
    valid: BoolArray | None = None


class ScoredPositions(msgspec.Struct, frozen=True, kw_only=True):
    """A model's distributions at a few response positions, in more detail than `TokenScores` has of all of them."""

    topk_ids: IntArray  # (N, K) descending by probability; special tokens included, as everywhere
    topk_logprobs: FloatArray  # (N, K)
    entropy_lower: FloatArray  # (N,) nats
    entropy_upper: FloatArray  # (N,) equal to entropy_lower when it is exact


class Traffic(msgspec.Struct, kw_only=True):
    """What went to and came from one server so far. Bodies only, as they were on the wire."""

    requests: int = 0  # attempts, whatever came of them
    sent_bytes: int = 0
    received_bytes: int = 0
    # Tokens as replies state them, else as requests had them. Counted only for servers that are not our own.
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts', those that the server had in its cache
    completion_tokens: int = 0


class SoftTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Sparse target distributions at some response positions of one trajectory."""

    positions: IntArray  # (N,) 0-based response positions
    token_ids: IntArray  # (N, k)
    probabilities: FloatArray  # (N, k) rows sum to 1
    weights: FloatArray  # (N,) factor of each position's cross-entropy in the trajectory's loss
    # (N,) added to each cross-entropy before it is weighted; without a gradient. Minus the target's entropy
    # makes the reported loss the KL divergence that a method is defined by.
    offsets: FloatArray | None = None


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the trainer needs of one trajectory. It names no method."""

    prompt_ordinal: int
    problem_id: str
    prompt_ids: IntArray  # (P,)
    response_ids: IntArray  # (T,)
    behavior_logprobs: FloatArray  # (T,) log pi_old of the sampled tokens
    version: WeightVersion | None  # oldest student weights that sampled a token; None when none did (off-policy)
    teacher_logprobs: FloatArray | None = None  # (T,) advantages follow as teacher - behaviour
    advantages: FloatArray | None = None  # (T,) given directly; exclusive with teacher_logprobs
    reference_logprobs: FloatArray | None = None  # (T,) for the reference KL
    policy_mask: BoolArray | None = None  # (T,) false where nothing is known of the advantage; None: known everywhere
    soft_targets: SoftTargets | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy returns for one trajectory: the trainer's part, and what people look at.

    `supervision` is None for a trajectory that is not trained on; its record says why. `metrics` are
    averaged over the iteration under their own names; `record` becomes one line of `samples.jsonl` and
    holds plain values and arrays (NaN is written as null).
    """

    supervision: Supervision | None
    metrics: dict[str, float]
    record: dict[str, Any]


class PolicyNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy asks of the backends; checked against `Capabilities` before the first request."""

    teacher_top_k: int = 0  # of the teacher's scores; 0: the teacher scores nothing
    teacher_top_k_key: str | None = None  # the key of `policy` that sets it
    teacher_responses: bool = False  # the teacher writes responses of its own
    reference: bool = False  # log-probabilities under a frozen reference
    exact_entropy: bool = False
    candidate_logprobs: bool = False
    outcomes: bool = True  # whether responses are right, so that problems must have answers
    samples_per_prompt: int = 1  # trajectories, at most
    probes_per_prompt: int = 0  # at most
    soft_target_bytes: int = 0  # at most, per trajectory on the wire
    soft_target_bytes_per_token: int = 0  # the same, growing with the response
    record_bytes: int = 0  # at most, per trajectory: what its record holds beside texts and values of each token

    @property
    def teacher(self) -> bool:
        """Whether a teacher must be served at all."""
        return self.teacher_top_k > 0 or self.teacher_responses


class PolicyContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know of the run it is part of."""

    vocab_size: int  # width of the teacher's softmax; of the student's in a run without a teacher
    vocab_limit: int | None = None  # ids below it have a row in every model's softmax; None: all have the same rows
    tokenizer: Any  # that model's transformers tokenizer; ids mean the same to the student
    sampling: SamplingConfig = msgspec.field(default_factory=SamplingConfig)  # of rollouts and the teacher's responses
    teacher: str | None = None  # its model's directory, for people; None in a run without one
    # Tells teachers apart: a digest of the weights and of the names it is asked by. Slow, it reads all weights.
    teacher_identity: Callable[[], str] | None = None
    run_seed: int = 0  # a policy's own random numbers derive from it and the prompt's ordinal
    reference_kl: bool = False  # whether the run's loss has a KL to the reference


class WeightSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights: a Hugging Face directory with safetensors, complete once it is named."""

    directory: str
    version: WeightVersion


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration of the trainer produced."""

    snapshot: WeightSnapshot
    metrics: dict[str, float]  # loss parts, ratio and clip statistics, gradient norm, tokens, seconds


# How a student's server gives log-probabilities of chosen tokens at chosen positions. batched: all positions of a
# response in one forward pass. single: one request or more for each position. none: not at all.
CandidateSupport = Literal["batched", "single", "none"]
# The temperature that served log-probabilities are at: the request's own, or 1 whatever the request says.
LogprobTemperature = Literal["request", "one"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend was found to offer at start-up. A policy states what it needs of these.

    The defaults are what our own engine does; a backend for a server that does less says so.
    """

    model: str
    vocab_size: int  # of the model's softmax
    vocab_fingerprint: str  # equal for two servers whose tokenizers map the same ids to the same tokens
    max_context_tokens: int
    max_top_k: int  # of scores; 0 where the server scores no given tokens
    unscored: str = ""  # why it scores none, for people: what it was asked for, and what it answered
    max_generation_top_k: int = 0  # of generations, per sampled token
    # Of single positions that are asked for again (`protocols.PositionScorer`); 0: not offered. A server that serves
    # as many as `vocab_size` gives exact entropies there.
    max_position_top_k: int = 0
    exact_entropy: bool  # else scores carry bounds from the served top-k
    candidate_logprobs: CandidateSupport
    weight_update: bool
    generation: bool = True
    token_id_prompts: bool = True  # else text, and positions tokenised otherwise are masked
    every_position: bool = True  # else scores may leave positions out (`TokenScores.valid`)
    sampled_token_ids: bool = True  # else generations are text that is tokenised again: for KD and evaluation only
    abort: bool = True  # a request that is given up frees its place at once
    # Largest difference seen between two computations of the same row; intervals are widened by it.
    logprob_noise_nats: float = 0.0
    logprob_convention: Literal["untruncated", "truncated"] = "untruncated"
    score_temperature: LogprobTemperature = "request"
    generation_temperature: LogprobTemperature = "request"
    seeds: bool = True  # equal requests with equal seeds give equal tokens, whatever runs beside them
    slots: int | None = None  # requests that it has memory for at once; None where the server does not say
    prefix_caching: bool | None = None  # None where the server does not say
    weight_transport: str | None = None  # how new weights reach it, for people; None where none do or it does not say
    # Weights that are being served; None when a server that was already running may hold any.
    version: WeightVersion | None = WeightVersion(0, 0)
    server: str = "local"  # name and version of the server, for people
