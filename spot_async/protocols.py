"""What the orchestrator asks of backends, verifiers and policies. Small, and all of it async.

Deadlines are absolute, on the running loop's clock (`asyncio.get_running_loop().time()`): an
implementation gives up with `DeadlineExceededError` when one passes. All of them may be cancelled
at any await and must then stop the work they started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, runtime_checkable

from spot_async.models.end_tokens import EndTokens
from spot_async.spending.account import Account
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    PolicyNeeds,
    Problem,
    Prompt,
    Sample,
    SamplingSettings,
    ScoredPositions,
    Supervision,
    TokenScores,
    Traffic,
    TrainReport,
    Verdict,
    WeightSnapshot,
    WeightVersion,
)


@runtime_checkable
class Generator(Protocol):
    """Student rollouts and probes, the teacher's responses, evaluation."""

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling: SamplingSettings,
        *,
        top_k: int = 0,
        session: str | None = None,
        deadline: float,
    ) -> Generation:
        """Sample one response to `prompt_ids` (P,), with the sampled tokens' log-probabilities.

        `top_k` > 0 also asks for the most likely tokens of each position, (T, top_k). `session` names requests that
        share a prefix, as a hint. `sampling.vocab_limit` limits what is sampled, before top-p, and no log-probability.
        Raises a `RequestError`.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """Log-probabilities of given tokens: the teacher, a frozen reference."""

    async def score(
        self, prompt_ids: IntArray, response_ids: IntArray, *, top_k: int, temperature: float, deadline: float
    ) -> TokenScores:
        """Log-probabilities of `response_ids` (T,) after `prompt_ids` (P,), and the top-k of each position.

        At `temperature`, that of the rollouts, so that equal models give equal log-probabilities. Raises a
        `RequestError`.
        """
        ...


@runtime_checkable
class PositionScorer(Protocol):
    """Optional for a teacher whose scores only bound the entropy: single positions again, with a wider top-k.

    A selection hangs on few positions; there a wider top-k narrows the bounds, and one as wide as the vocabulary
    makes them exact. A server that returns the distribution after a prompt can do this, one request a position:
    SGLang up to the vocabulary's size (top_logprobs_num), vLLM up to its --max-logprobs. `Capabilities` say how
    wide: `max_position_top_k`.
    """

    async def score_at(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        positions: IntArray,
        *,
        top_k: int,
        temperature: float,
        deadline: float,
    ) -> ScoredPositions:
        """Rows for response positions (N,), 0-based: the distributions that decide `response_ids[positions]`.

        `top_k` is at most `max_position_top_k`. What is returned stands for these positions from then on: it is
        taken for exact, where `score` is taken to be within `logprob_noise_nats` of it.
        """
        ...


@runtime_checkable
class CandidateScorer(Protocol):
    """Log-probabilities of chosen tokens at chosen positions: the behaviour student."""

    async def candidate_logprobs(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        temperature: float,
        expected_version: WeightVersion,
        deadline: float,
    ) -> FloatArray:
        """(N, k) for positions (N,) and candidate_ids (N, k), at `temperature`.

        Raises `VersionMismatchError` when the server holds other weights than `expected_version`.
        """
        ...


@runtime_checkable
class WeightSink(Protocol):
    """Servers that take new student weights. All or nothing: on an error the old ones still serve."""

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Returns once the server answers with the snapshot's weights. Raises a `RequestError`."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """Optional for a student's server that shares its devices with the trainer: it gives their memory back meanwhile.

    Asked to sleep only when nothing is in flight, and for nothing else until it is awake. It wakes with the weights
    it had; new ones are sent after that.
    """

    @property
    def sleeps_while_training(self) -> bool:
        """Whether its settings ask for it."""
        ...

    async def sleep(self, *, deadline: float) -> None:
        """Returns once the memory is free."""
        ...

    async def wake(self, *, deadline: float) -> None:
        """Returns once the server can be asked again."""
        ...


class Backend(Protocol):
    """A running inference service in one role. Entering starts it and waits until it answers."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def capabilities(self, *, deadline: float) -> Capabilities:
        """What the server was found to offer. May be asked once the backend has been entered."""
        ...

    async def watch(self) -> None:
        """Run for as long as the service lives; raise `ProcessDiedError` when it ends by itself."""
        ...


@runtime_checkable
class TrafficSource(Protocol):
    """Optional for a backend that talks to a server: how much, for the metrics `traffic/<role>/...`."""

    @property
    def traffic(self) -> Traffic:
        """Grows while the backend runs; there once it has been entered."""
        ...


@runtime_checkable
class HealthCheck(Protocol):
    """Optional for a backend: whether its server lives, asked when it has not answered for a while."""

    async def ping(self, *, deadline: float) -> None:
        """Cheap, and no lie: fails for a server that is frozen, dead, or that answers but computes nothing.

        Raises a `RequestError`. One that is merely busy, or loads weights, passes.
        """
        ...


@runtime_checkable
class Replicated(Protocol):
    """Optional for a backend that stands for several servers of its role: each of them, to be asked for itself."""

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The servers' backends by name, as they are now; there once it has been entered."""
        ...


@runtime_checkable
class Billed(Protocol):
    """Optional for a backend whose requests are counted, limited or cost money."""

    account: Account  # shared by all replicas of a role: set before the backend is entered


class Verifier(Protocol):
    """Judges a whole response. Never raises for what a model wrote: that is a verdict."""

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        """The verdict on a whole response. One that could not be reached is `Verdict.TIMEOUT` or `Verdict.ERROR`."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class PromptStages(Protocol):
    """The stages as one prompt's coroutine sees them: priority, seed and deadline are already its own."""

    @property
    def student(self) -> Capabilities | None:
        """What the student's server was found to offer; None where nobody said: then all that a policy may ask for."""
        ...

    @property
    def teacher(self) -> Capabilities | None:
        """The same of the teacher's."""
        ...

    @property
    def ends(self) -> EndTokens:
        """What ends a response. Tokens that stages take and give end as the student's do, the teacher's too."""
        ...

    async def rollout(self, *, n: int = 0, top_k: int = 0) -> Generation:
        """Sample the prompt's n-th response from the behaviour policy, with the top-k of each token's distribution."""
        ...

    async def teacher_response(self) -> Generation:
        """Sample a response from the teacher, with the rollouts' settings."""
        ...

    async def score(self, response_ids: IntArray, *, top_k: int) -> TokenScores:
        """Score the response under the teacher. Its top-k are tokens that all models know.

        With `top_k` 0 only the response's own tokens and the entropies are wanted, and the top-k may be anything.
        """
        ...

    async def score_at(self, response_ids: IntArray, positions: IntArray, *, top_k: int) -> ScoredPositions:
        """Score single positions under the teacher once more, with a wider top-k; see `PositionScorer`.

        Fewer than `top_k` tokens come back where some of those are not known to all models.
        """
        ...

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        """Log-probabilities (T,) of the response under the frozen reference."""
        ...

    async def candidate_logprobs(
        self, response_ids: IntArray, positions: IntArray, candidate_ids: IntArray, *, version: WeightVersion
    ) -> FloatArray:
        """Behaviour-policy log-probabilities (N, k) of candidates at response positions."""
        ...

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        """The n-th continuation after `response_ids[:position], candidate_id`."""
        ...

    async def verify(self, response_ids: IntArray) -> Verdict:
        """Judge a whole response to this prompt; missing evidence has already been retried once."""
        ...

    def decode(self, token_ids: IntArray) -> str:
        """Text of response tokens, special tokens left out."""
        ...


class Policy(Protocol):
    """A method: one coroutine per prompt over the stages. No I/O and no scheduling of its own.

    One that cannot supervise every prompt is also a `ScheduleChecker`.
    """

    @property
    def needs(self) -> PolicyNeeds:
        """What it asks of the backends; the same throughout a run."""
        ...

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        """Algorithm 1 for one prompt: its samples, one per trajectory.

        Errors of stages are raised through: a `RequestError` gives up the prompt, `BudgetSpentError` ends admission.
        """
        ...


@runtime_checkable
class ScheduleChecker(Protocol):
    """Optional for a policy: told before anything starts which prompts the run will train on."""

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Told all prompts in admission order, of every epoch. Raises ConfigError or DataError to refuse the run."""
        ...


class Trainer(Protocol):
    """The other end of the supervision queue: takes a batch, answers with new weights."""

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        """Train on one batch; returns once the new weights are published. Iterations count from 0.

        Raises `TrainerError` when a rank stopped (non-finite loss, full disk, killed).
        """
        ...
