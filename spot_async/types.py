"""The values that travel between data, stages, policies and the trainer.

Plain records without behaviour. Arrays are numpy, never lists of floats. Records that cross a process boundary are
msgspec structs, so that `base/wire.py` can encode them without pickle.

Conventions, everywhere in this package:
* Response positions are 0-based: position `t` is the decision for `response_ids[t]`
  (the paper's `t` is this plus one). `models/alignment.py` maps positions to model output rows.
* Log-probabilities are natural logs over the full vocabulary, of the untruncated distribution
  at the stated temperature.
* Shapes name their axes: P prompt tokens, T response tokens, K served top-k, N positions,
  k candidates per position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.config import SamplingConfig, TrainingConfig
from spot_async.errors import ContractError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]  # indices, as numpy returns them
Float64Array = npt.NDArray[np.float64]  # for computing
Array = npt.NDArray[Any]

FinishReason = Literal["stop", "length"]
NO_TOKEN = -1  # in place of an id, behind the last token of a row that has fewer than others
LEAST_NATS = -80.0  # of a cell, and of no token: a probability below e^-80 could not be told from 0 in float32
LARGEST_REWARD = 1e30  # squares of such numbers, and sums of them, are still finite


class Renamed(msgspec.StructMeta):
    """Makes structs that answer a field's old name with the new one, as their `renamed` says."""

    renamed: Mapping[str, str]

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        if old := fields.keys() & cls.renamed.keys():
            raise ContractError("; ".join(f"{cls.__name__}.{name} is now {cls.renamed[name]}" for name in sorted(old)))
        return super().__call__(*values, **fields)


class WeightVersion(NamedTuple):
    """Which weights a token came from. After a roll-back steps repeat, and the lineage tells them apart."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Return the version that `str` wrote. Raises ValueError for any other text."""
        lineage, _, step = text.partition(".")
        return cls(int(lineage), int(step))


class Verdict(StrEnum):
    """What a verifier found about a response. The first three are outcomes, the next two are missing evidence."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNJUDGED = "unjudged"  # neither right nor wrong: nothing to judge by, or the verifier gives a number alone

    @property
    def reward(self) -> float | None:
        """Return 1 or 0; None where the verifier could not, or had no need to, decide."""
        if self.is_missing or self is Verdict.UNJUDGED:
            return None
        return 1.0 if self is Verdict.CORRECT else 0.0

    @property
    def is_missing(self) -> bool:
        """Whether evidence is missing. Asking once more may find it."""
        return self in (Verdict.TIMEOUT, Verdict.ERROR)


class Judgement(msgspec.Struct, frozen=True):
    """What a verifier says of a response: a verdict and, where it has them, a number and a text.

    The number is what methods learn from. Where none is given it is the verdict's: 1, 0, or None. Accuracy counts
    verdicts alone.
    """

    verdict: Verdict
    reward: float | None = None
    feedback: str = ""  # in words, for people and for policies that show it to a teacher

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what is no judgement. A number beside missing evidence would be made up."""
        if not isinstance(self.verdict, Verdict):
            raise TypeError(f"verdict must be a Verdict, not {self.verdict!r}")
        if not isinstance(self.feedback, str):
            raise TypeError(f"feedback must be a text, not {type(self.feedback).__name__}")
        if self.reward is None:
            msgspec.structs.force_setattr(self, "reward", self.verdict.reward)
        elif isinstance(self.reward, bool) or not isinstance(self.reward, int | float):
            raise TypeError(f"reward must be a number, not {self.reward!r}")
        elif self.verdict.is_missing:
            raise ValueError(f"reward {self.reward:g} beside the verdict {self.verdict}, which is none")
        elif not (math.isfinite(self.reward) and abs(self.reward) <= LARGEST_REWARD):
            raise ValueError(f"reward {self.reward:g} is no number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
        else:
            msgspec.structs.force_setattr(self, "reward", float(self.reward))

    def __getattr__(self, name: str) -> object:
        """Tell policies that were written when stages gave a bare verdict."""
        hint = f"; its verdict has: .verdict.{name}" if name in ("value", "is_missing") else ""
        raise AttributeError(f"a Judgement has no {name!r}{hint}")


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation, in the form that chat templates read."""

    role: str  # system, user or assistant
    content: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a problem file."""

    id: str
    text: str  # the question; in a conversation the user's last message
    answer: str  # the letter of the right choice if there are choices; empty if there is no answer or a judge decides
    tier: str | None = None  # group that evaluation tables report separately (difficulty, subject, ...)
    category: str | None = None  # subject or source, by which examples are matched
    choices: tuple[str, ...] = ()  # in the file's order, A first; not part of the text
    solution: str | None = None  # a worked solution, where examples are made from it
    response: str | None = None  # a written one that a policy may learn from
    opening: str = ""  # what an environment says of it, behind the text
    columns: dict[str, Any] = {}  # further ones of its row, by name, for an environment
    tools: tuple[dict[str, Any], ...] = ()  # of an environment, which its prompts show: JSON schemas
    history: tuple[ChatTurn, ...] = ()  # the messages before the text: a system message, earlier turns
    set_key: str = ""  # the key of its training set: `data.train`, or `data.train.1` where there are several
    instruction: str | None = None  # what follows the text in a prompt; None: what the configuration says of all
    domain: str | None = None  # the value by which `policy.route` chooses its teacher
    teacher: str = ""  # the one of several that its prompts ask; empty: all that there are

    def asks(self, teacher: str) -> bool:
        """Return whether prompts of the problem ask the teacher of this name. The only one has none."""
        return not teacher or self.teacher in ("", teacher)

    @property
    def shown(self) -> str:
        """Return the whole question as people read it."""
        return "\n".join([*(f"[{turn.role}] {turn.content}" for turn in self.history), self.text])


class PromptSource(msgspec.Struct, frozen=True, kw_only=True):
    """A problem with its rendered prompt, before it has a place in the run."""

    problem: Problem
    token_ids: IntArray  # (P,) the rendered chat prompt
    teacher_ids: IntArray | None = None  # (R,) the same problem as the teacher reads it; None: as the student does
    own_ids: dict[str, IntArray] = {}  # likewise, of those among several teachers that read another, by name
    message: str = ""  # the user's last one as the student reads it: the text and the instruction; empty: the text

    @property
    def read_by_teacher(self) -> IntArray:
        """Return the ids that the teacher reads, unless a policy gives it others."""
        return self.token_ids if self.teacher_ids is None else self.teacher_ids

    def read_by(self, teacher: str) -> IntArray:
        """Return the ids that the teacher of this name reads, as `read_by_teacher`."""
        return self.own_ids.get(teacher, self.read_by_teacher)


class Prompt(PromptSource, frozen=True, kw_only=True):
    """A problem at its place in the run."""

    ordinal: int  # place in admission order; seeds and priorities derive from it
    # The iteration that trains on it if no prompt before it is given up; the first one is 0. Of the ordinal alone, so
    # neither timing nor a resume changes it. With its share of the run's iterations, in [0, 1). 0 outside of a run.
    iteration: int = 0
    progress: float = 0.0

    def turns(self, *further: str) -> list[ChatTurn]:
        """Return what the student reads as turns: earlier ones, then the user's message with its instruction.

        The texts in `further` follow in that message.
        """
        message = " ".join(filter(None, [self.message or self.problem.text, *further]))
        return [*self.problem.history, ChatTurn(role="user", content=message)]


def place_in_run(ordinal: int, batch_size: int, iterations: int) -> dict[str, Any]:
    """Return a prompt's `iteration` and `progress`. Those that replace others behind the last batch are of its own."""
    iteration = min(ordinal // batch_size, iterations - 1)
    return {"iteration": iteration, "progress": iteration / iterations}


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one request samples. `seed` alone decides its randomness, whatever runs beside it."""

    temperature: float = 1.0  # 0: always the likeliest token, with log-probabilities as the server sees fit
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    # Only ids below this are sampled; None allows all. As under top-p, log-probabilities stay those of the whole
    # softmax.
    vocab_limit: int | None = None
    # By the names of vLLM and SGLang: top_k, min_p and penalties. A server without one must refuse it.
    further: tuple[tuple[str, float], ...] = ()


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a response were sampled by `version`; None: no student sampled them."""

    start: int
    end: int
    version: WeightVersion | None
    is_read: bool = False  # nobody answered with these tokens: an environment wrote them, and nothing learns them


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled response."""

    token_ids: IntArray  # (T,) the end token included when it was generated
    logprobs: FloatArray  # (T,) of the sampled tokens
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]  # cover [0, T) in order
    # (T, K) when top_k > 0 was asked for. Ids beyond `vocab_limit` may or may not be among them.
    topk_ids: IntArray | None = None
    topk_logprobs: FloatArray | None = None  # (T, K)


class ScoreRequest(msgspec.Struct, frozen=True):
    """A response that a server is asked to score: in full, at single positions, or for chosen tokens."""

    prompt_ids: IntArray  # (P,)
    response_ids: IntArray  # (T,)
    temperature: float  # of all log-probabilities: that of the rollouts, so that equal models give equal ones
    deadline: float  # absolute, on the running loop's clock

    @property
    def token_ids(self) -> IntArray:
        """The prompt and the response as one sequence, (P + T,)."""
        return np.concatenate([self.prompt_ids, self.response_ids])


class TokenScores(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a given response under a model. There are rows for response tokens only."""

    logprobs: FloatArray  # (T,) of the response's own tokens
    topk_ids: IntArray  # (T, K) descending by probability; beside `rows` a row may end in `NO_TOKEN`
    topk_logprobs: FloatArray  # (T, K)
    entropy: FloatArray  # (T,) nats; a midpoint where only bounds are known
    entropy_lower: FloatArray  # (T,) of the row as it was served, without noise; equal to entropy when it is exact
    entropy_upper: FloatArray  # (T,)
    version: WeightVersion | None  # None, as stages give it: of a model that does not change
    # (T,) false where nothing is known, because a server that reads text tokenised it differently there. Such rows
    # hold finite placeholders, which must not be used. None: all rows are known.
    valid: BoolArray | None = None
    # (T,) of all tokens outside the row's top-k together; minus infinity where there are none, or next to none. None:
    # the server does not say. What the top-k's probabilities leave of 1 would be rounding where the model is sure.
    tail_logprobs: FloatArray | None = None
    # (T,) of a teacher that reads in its own tokens: the number of each token's chunk, ascending; -1 where nothing is
    # known. Only the sums of `logprobs` over a chunk are the teacher's, in even parts. None: each token is a chunk.
    chunks: IntArray | None = None
    rows: BoolArray | None = None  # (T,) where such a teacher's top-k and entropies are known. None: where scores are
    counted: int | None = None  # tokens of the response that were answered and not only read; None: all of them

    @property
    def known(self) -> BoolArray:
        """Where something is known (T,)."""
        return np.ones(len(self.logprobs), np.bool_) if self.valid is None else self.valid

    @property
    def known_rows(self) -> BoolArray:
        """Where top-k and entropy are known (T,)."""
        return self.known if self.rows is None else self.known & self.rows


class ScoredPositions(msgspec.Struct, frozen=True, kw_only=True):
    """A model's distributions at a few response positions, in more detail than in `TokenScores`."""

    topk_ids: IntArray  # (N, K) descending by probability; special tokens included, as everywhere
    topk_logprobs: FloatArray  # (N, K)
    entropy_lower: FloatArray  # (N,) nats
    entropy_upper: FloatArray  # (N,) equal to entropy_lower when it is exact


class Traffic(msgspec.Struct, kw_only=True):
    """What went to and came from one server so far. Byte counts are of bodies only, as they were on the wire."""

    requests: int = 0  # attempts, whether they succeeded or not
    sent_bytes: int = 0
    received_bytes: int = 0
    # Tokens as replies state them, or else as counted in requests. Not counted for our own server.
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the server already had in its cache
    completion_tokens: int = 0


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A model that pulls the student towards its own log-probabilities of the response's tokens.

    It adds `weights * clip(logprobs - log pi_old)` to the advantages. The trainer computes that, because log pi_old is
    not known yet where `training.behavior` recomputes it. What the model said must not change while the sample waits.

    With chunks (`models/chunks.py`) a difference is that of a chunk's sums. Its tokens share it in proportion to
    log pi_old, so that all of them are pulled the same way.
    """

    logprobs: FloatArray  # (T,)
    weights: FloatArray | None = None  # (T,) None: 1
    clip: tuple[float, float] | None = None  # the least and the most of the difference, in nats; may be infinite
    version: WeightVersion | None = None  # which weights of a teacher that follows the student; None: it never changes
    chunks: IntArray | None = None  # (T,) as in `TokenScores`


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """How far the student q is from a target p: a sum over cells, which are tokens, and all other tokens together.

        D = sum of  min(clip, forward p log(p / m) + reverse q log(q / n))
        m = (1 - forward_skew) q + forward_skew p,  n = (1 - reverse_skew) p + reverse_skew q

    docs/methods.md has the names of the usual ones.
    """

    forward: float = 0.0
    reverse: float = 0.0
    forward_skew: float = 0.0
    reverse_skew: float = 0.0
    is_conditional: bool = False  # the student is renormalised on the target's tokens, so there are no others
    clip: float | None = None  # of each cell, in nats; without a gradient beyond it
    # Of both distributions. Other than 1 only where a conditional's tokens are the whole vocabulary, where it is exact.
    temperature: float = 1.0


class SoftTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Target distributions on a few tokens, at some response positions of one trajectory. Positions may repeat.

    With baselines the loss is `-sum_v (probabilities - baselines) log pi`, which teaches only what goes beyond them. It
    may have no lower bound. The absolute values of its gradient in the logits sum to at most 2 a position and weight.
    """

    positions: IntArray  # (N,) 0-based response positions
    token_ids: IntArray  # (N, k); a row may end in `NO_TOKEN`, whose probabilities do not count
    probabilities: FloatArray  # (N, k) rows sum to 1, with the tails if there are some
    weights: FloatArray  # (N,) factor of each position's loss in the trajectory's loss
    tails: FloatArray | None = None  # (N,) probability of all other tokens together; None: there is nothing else
    divergence: Divergence | None = None  # of the student from them; None: the cross-entropy
    baselines: FloatArray | None = None  # (N, k) taken off the probabilities of a cross-entropy without tails
    version: WeightVersion | None = None  # as a `Pull`'s

    @property
    def has_tail_cell(self) -> bool:
        """Whether all other tokens together are a cell of the loss, so that the student's tail is needed."""
        kind = self.divergence
        return self.tails is not None or (kind is not None and kind.reverse > 0 and not kind.is_conditional)


class Supervision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=Renamed):
    """Everything the trainer needs of one trajectory: a sum of terms. It names no method."""

    renamed: ClassVar = {"teacher_logprobs": "a pull: give pulls=(pull(scores),)"}

    prompt_ordinal: int
    problem_id: str
    prompt_ids: IntArray  # (P,)
    response_ids: IntArray  # (T,)
    behavior_logprobs: FloatArray  # (T,) log pi_old of the sampled tokens
    version: WeightVersion | None  # oldest student weights that sampled a token; None when none did (off-policy)
    version_spans: tuple[VersionSpan, ...] = ()  # cover [0, T) in order; empty: `version` sampled all tokens
    pulls: tuple[Pull, ...] = ()  # towards models; their shares of the advantages are added up
    advantages: FloatArray | None = None  # (T,) the part of the advantages that depends on no model, such as a reward
    reference_logprobs: FloatArray | None = None  # (T,) for the reference KL
    policy_mask: BoolArray | None = None  # (T,) false where the advantage is unknown; None: known everywhere
    soft_targets: tuple[SoftTargets, ...] = ()
    entropy_bonus: FloatArray | None = None  # (T,) factor of the student's entropy, which the loss has with a minus

    @property
    def has_policy_term(self) -> bool:
        """Whether sampled tokens have advantages, from models or given."""
        return bool(self.pulls) or self.advantages is not None


class LiveRows(msgspec.Struct, frozen=True, kw_only=True):
    """What the student in training says at the positions of soft targets. It is over its full vocabulary."""

    logprobs: FloatArray  # (N, k) of the targets' tokens
    tail_logprobs: FloatArray  # (N,) of all other tokens together


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What the student in training says of one trajectory, before the iteration's first update.

    `where` is true on tokens that a student sampled and that may have a policy term (`policy_mask`). Elsewhere
    log-probabilities and entropies are NaN. `rows` have numbers at all positions of the targets.
    """

    logprobs: FloatArray  # (T,) of the response's tokens
    entropy: FloatArray  # (T,) nats, of the whole softmax at `sampling.temperature`
    where: BoolArray  # (T,)
    rows: tuple[LiveRows, ...] = ()  # of its soft targets, in their order


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy returns for one trajectory: supervision for the trainer, metrics and a record for people.

    `supervision` is None for a trajectory that is not trained on, and its record says why. `metrics` are averaged over
    the iteration under their own names. `record` becomes one line of `samples.jsonl`. It holds plain values and arrays
    (NaN is written as null). `notes` are arrays that `revise` gets back, after a resume too, and nobody else.
    """

    supervision: Supervision | None
    metrics: dict[str, float]
    record: dict[str, Any]
    notes: dict[str, Array] = {}


class LiveBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is about to be trained, and what the student in training says of it."""

    samples: Sequence[Sample]  # those with supervision, in the order of admission
    live: Sequence[Live]  # of each sample
    iteration: int  # the first one is 0
    progress: float  # `iteration` as a share of the run's iterations, in [0, 1)


class IterationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy that observes is told of an iteration that was trained. Nothing in it is decided by a clock."""

    iteration: int  # the first one is 0
    metrics: dict[str, float]  # by their names in metrics.jsonl: means of the batch, and `train/...`
    # Metrics of the weights after `iteration - max_staleness` iterations, which the run has waited for, however early
    # they were there; empty where none were due.
    evaluation: dict[str, float]


class PolicyNeeds(msgspec.Struct, frozen=True, kw_only=True, metaclass=Renamed):
    """What a policy needs from the backends. Checked against their `Capabilities` before the first request."""

    renamed: ClassVar = {
        "soft_target_bytes": "term_bytes",
        "soft_target_bytes_per_token": "term_bytes_per_token",
    }

    teachers: tuple[str, ...] = ()  # names of those that it asks, where it asks several; each as the fields below say
    teacher_top_k: int = 0  # of the teacher's scores; 0: the teacher scores nothing
    # What it asks scores for, up to what a server gives. None: `teacher_top_k`; 0: for the response's own tokens alone.
    asked_top_k: int | None = None
    teacher_top_k_key: str | None = None  # the key of `policy` that sets it, and a `rollout_top_k`
    whole_softmax_key: str | None = None  # the key of `policy` whose value needs all rows of the student's softmax
    renormalised_rows: bool = False  # it takes the teacher's top-k for the whole distribution
    teacher_candidates: bool = False  # the teacher's log-probabilities of tokens that the policy chooses
    teacher_prompt_tokens: int = 0  # of the longest prompt that the policy makes for the teacher
    reference: bool = False  # log-probabilities under a frozen reference
    exact_entropy: bool = False
    candidate_logprobs: bool = False
    candidates_key: str | None = None  # the key of `policy` whose value needs those, or at least a rollout's top-k
    rollout_top_k: int = 0  # that it cannot do without at each sampled token
    outcomes: bool = True  # it learns from whether responses are right, so problems must have answers
    written_responses: bool = False  # it learns from responses in the data, so problems must have one
    # The most requests of one prompt at the same time. Its stages refuse the first one above.
    rollouts_per_prompt: int | None = None  # None: one for each trajectory; 0: the student writes nothing
    scores_per_prompt: int | None = None  # None: one for each trajectory
    probes_per_prompt: int = 0
    teacher_responses: int = 0  # that the teacher writes
    rounds: int = 1  # how often a prompt goes through its stages, one time after the other, at most
    # Upper limits, by which room is reserved when a prompt is admitted.
    samples_per_prompt: int = 1  # trajectories
    term_bytes: int = 0  # of pulls and soft targets on the wire, and of notes, per trajectory
    term_bytes_per_token: int = 0  # likewise, per response token
    record_bytes: int = 0  # per trajectory: its record without texts and per-token values

    @property
    def teacher_rows(self) -> bool:
        """Whether it asks for the teacher's distribution, and not for the response's own tokens alone."""
        return self.teacher_scores and (self.teacher_top_k if self.asked_top_k is None else self.asked_top_k) > 0

    @property
    def teacher(self) -> bool:
        """Whether a teacher must be served at all."""
        return self.teacher_scores or self.teacher_responses > 0

    @property
    def teacher_scores(self) -> bool:
        """Whether the teacher scores responses, by its own top-k or for tokens that the policy chooses."""
        return self.teacher_top_k > 0 or self.teacher_candidates


class PolicyContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know about its run."""

    vocab_size: int  # width of the teacher's softmax (the widest, of several), or of the student's without a teacher
    vocab_limit: int | None = None  # ids below this have a row in every model's softmax; None: all have the same rows
    tokenizer: Any  # the same model's transformers tokenizer; ids mean the same to the student
    teachers: tuple[str, ...] = ()  # the names of several (`teachers.<name>`); empty for the only one, or none
    sampling: SamplingConfig = msgspec.field(default_factory=SamplingConfig)  # of rollouts and the teacher's responses
    # Returns where the answer begins in a response's text, None for one without. None where the verifier reads no box.
    answer_start: Callable[[str], int | None] | None = None
    run_seed: int = 0  # a policy derives its random numbers from this and the prompt's ordinal
    reference_kl: bool = False  # whether the run's loss has a KL to the reference
    training: TrainingConfig = msgspec.field(default_factory=lambda: TrainingConfig(epochs=1))
    max_staleness: int = 0  # by how many updates the weights that sampled a response may be behind


class WeightFile(msgspec.Struct, frozen=True):
    """A weight file as it was when it was complete. Whoever writes or replaces it changes this."""

    name: str  # within the snapshot's directory
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int  # also by new links, owners and modes; no program can set it


class WeightSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights: a Hugging Face directory with safetensors. It has its name only once it is complete."""

    directory: str
    version: WeightVersion
    files: tuple[WeightFile, ...] = ()  # as they were published; empty: not looked at


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration of the trainer produced."""

    snapshot: WeightSnapshot
    metrics: dict[str, float]  # loss parts, ratio and clip statistics, gradient norm, tokens, seconds
    performance: dict[str, float] = {}  # how the trainer used its devices: tokens a second, arithmetic, memory
    # What teachers that follow the student have from now on, by role; one that is missing has the initial weights.
    teachers: dict[str, WeightSnapshot] = {}


# How a server gives log-probabilities of chosen tokens at chosen positions.
# batched: all positions of a response in one forward pass. single: at least one request per position. none: not at all.
CandidateSupport = Literal["batched", "single", "none"]
# The temperature of served log-probabilities: the request's own, or always 1.
LogprobTemperature = Literal["request", "one"]


class BehindUrl(msgspec.Struct, frozen=True, kw_only=True):
    """What answered at one server's address, over several connections."""

    servers: int | None  # at least so many; None if nothing tells them apart
    differing: tuple[str, ...]  # what they said differently: process, version, weights


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery found that a backend offers. `PolicyNeeds` is what a policy needs of it.

    The defaults describe our own engine. A backend whose server does less says so.
    """

    model: str
    vocab_size: int  # of the model's softmax
    vocab_fingerprint: str  # equal for servers whose tokenizers map the same ids to the same tokens
    max_context_tokens: int
    max_top_k: int  # largest top-k of scores; 0 where the server cannot score given tokens
    unscored: str = ""  # why it cannot score, for people: what it was asked, and what it answered
    max_generation_top_k: int = 0  # largest top-k of each sampled token
    # Largest top-k of a single position that is asked for again (`protocols.PositionScorer`); 0: not offered. Where it
    # reaches `vocab_size`, entropies at such positions are exact.
    max_position_top_k: int = 0
    exact_entropy: bool  # False: scores carry bounds that follow from the served top-k
    candidate_logprobs: CandidateSupport
    weight_update: bool
    weights_need: str = ""  # what it lacks to take new weights, for people
    # It loads weights while requests are in flight, and names the version of each token (`Generation.version_spans`).
    # The responses under way continue, with keys and values of the new weights from then on. False: the student's
    # requests must have ended before an update.
    in_flight_updates: bool = False
    # Whether it is seen after each load that it holds what it was told to load; None: the first load tells.
    weights_checked: bool | None = True
    generation: bool = True
    token_id_prompts: bool = True  # False: it reads text, and positions that it tokenises differently are masked
    every_position: bool = True  # False: scores may leave positions out (`TokenScores.valid`)
    sampled_token_ids: bool = True  # False: generations are text that is tokenised again, good for KD and evaluation
    abort: bool = True  # a request that is given up frees its place at once
    # Between two computations of the same row: 99.9 % of log-probabilities differ by less, or all if it is below 1e-3.
    # Scores are widened by it.
    logprob_noise_nats: float = 0.0
    logprob_convention: Literal["untruncated", "truncated"] = "untruncated"
    score_temperature: LogprobTemperature = "request"
    generation_temperature: LogprobTemperature = "request"
    seeds: bool = True  # equal requests with equal seeds give equal tokens, whatever runs beside them
    dtype: str | None = None  # of weights and activations, such as float32; None where the server does not say
    slots: int | None = None  # requests that it has memory for at once; None where the server does not say
    prefix_caching: bool | None = None  # None where the server does not say
    weight_transport: str | None = None  # how new weights reach it, for people; None if they do not or it does not say
    # The weights being served. None: the server was already running and may hold any weights.
    version: WeightVersion | None = WeightVersion(0, 0)
    server: str = "local"  # name and version of the server, for people
