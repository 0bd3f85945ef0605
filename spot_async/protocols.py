"""What the orchestrator asks of backends, verifiers, policies and the trainer: the protocols they implement.

Deadlines are absolute, on the running loop's clock (`asyncio.get_running_loop().time()`). An implementation raises
`DeadlineExceededError` when its deadline passes. It may be cancelled at any await, and then stops the work it started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from spot_async.models.episodes import Action, Observation, Step
from spot_async.types import (
    BehindUrl,
    Capabilities,
    ChatTurn,
    FloatArray,
    Generation,
    IntArray,
    IterationReport,
    Judgement,
    Live,
    LiveBatch,
    PolicyNeeds,
    Problem,
    Prompt,
    Sample,
    SamplingSettings,
    ScoredPositions,
    ScoreRequest,
    Supervision,
    TokenScores,
    Traffic,
    TrainReport,
    Verdict,
    WeightFile,
    WeightSnapshot,
    WeightVersion,
)


@runtime_checkable
class Generator(Protocol):
    """Samples responses: the student's rollouts and probes, the teacher's responses, evaluation."""

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

        With `top_k` > 0 the reply also has the most likely tokens of each position, (T, top_k). `session` is a hint:
        requests with the same session may be sent together, and their replies may wait for each other.
        `sampling.vocab_limit` limits what is sampled, before top-p; it changes no log-probability. Raises a
        `RequestError`.
        """


@runtime_checkable
class Scorer(Protocol):
    """Scores given responses: the teacher, a frozen reference."""

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        """Return log-probabilities of the response's tokens (T,) after the prompt, and the top-k of each position.

        All are at the request's temperature. Raises a `RequestError`.
        """


@runtime_checkable
class BaseScorer(Protocol):
    """Scores with the weights that the student began with, beside newer ones. Optional, for a student's servers.

    Those that take adapters can: these weights are their base. So the frozen reference needs no server of its own.
    """

    async def score_base(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        """Return what `Scorer.score` returns, of the first weights."""


@runtime_checkable
class PositionScorer(Protocol):
    """Scores single positions with a wider top-k. Optional, for a teacher whose scores only bound the entropy.

    Few positions decide a selection. A wider top-k narrows their bounds, and one as wide as the vocabulary makes them
    exact. A server can do this if it returns the distribution after a prompt, with one request per position: SGLang up
    to the vocabulary's size (top_logprobs_num), vLLM up to its --max-logprobs. `Capabilities.max_position_top_k` says
    how wide.
    """

    async def score_at(self, request: ScoreRequest, positions: IntArray, *, top_k: int) -> ScoredPositions:
        """Return the distributions that decide the response's tokens at 0-based `positions` (N,).

        `top_k` is at most `max_position_top_k`. The caller treats what is returned as exact, and what `score` returned
        as off by `logprob_noise_nats`.
        """


@runtime_checkable
class CandidateScorer(Protocol):
    """Scores chosen tokens at chosen positions: the behaviour student, or a teacher."""

    async def candidate_logprobs(
        self,
        request: ScoreRequest,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        expected_version: WeightVersion | None,
    ) -> FloatArray:
        """Return the log-probabilities (N, k) of `candidate_ids` (N, k) at response positions (N,).

        All of them are of the same weights: `expected_version`, or where that is None those that the server holds when
        it answers. Raises `VersionMismatchError` when it holds others, or when they changed while it answered.
        """


@runtime_checkable
class WeightSink(Protocol):
    """Loads new student weights into a server, all or nothing: after an error the server still has the old ones."""

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Load the snapshot's weights; return once the server answers with them. Raises a `RequestError`."""


@runtime_checkable
class Sleeper(Protocol):
    """Frees a server's device memory while the trainer uses the same devices. Optional, for the student's server.

    It is asked to sleep only when no request is in flight, and it gets no request until it is awake. It wakes with the
    weights it had, unless new ones are sent in between: it takes those once its memory for weights is awake.
    """

    @property
    def sleeps_while_training(self) -> bool:
        """Whether its settings ask it to sleep."""

    async def sleep(self, *, deadline: float) -> None:
        """Free the memory; return once it is free."""

    async def wake_weights(self, *, deadline: float) -> None:
        """Take the memory for weights again, and nothing else. Nothing is done if that is awake."""

    async def wake(self, *, deadline: float) -> None:
        """Wake whatever still sleeps; return once the server answers requests again."""


class Backend(Protocol):
    """The client of one running server in one role. Entering starts the server and waits until it answers.

    The protocols above and below say what more it can do.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def capabilities(self, *, deadline: float) -> Capabilities:
        """Return what the server offers. Callers enter the backend first."""

    async def watch(self) -> None:
        """Run for as long as the server lives. Raises `ProcessDiedError` when it ends by itself."""


@runtime_checkable
class TrafficSource(Protocol):
    """Counts requests, bytes and tokens for the metrics `traffic/<role>/...`. Optional, for a backend."""

    @property
    def traffic(self) -> Traffic:
        """The counts so far. Callers enter the backend first."""


@runtime_checkable
class SharedAddress(Protocol):
    """Says how many servers answer at a server's address. Optional, for one that may be a router's or a balancer's."""

    async def behind_url(self, *, deadline: float) -> BehindUrl | None:
        """Ask over several connections. Return None if the server was started by this run."""


@runtime_checkable
class HealthCheck(Protocol):
    """Checks whether a server that has not answered for a while is alive. Optional, for a backend."""

    async def ping(self, *, deadline: float) -> None:
        """Raise a `RequestError` if the server is dead or frozen, or answers but computes nothing.

        A server that is only busy, or loads weights, passes. The check is cheap.
        """


@runtime_checkable
class Replicated(Protocol):
    """Gives access to each server. Optional, for a backend that stands for several servers of its role."""

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The servers' backends by name, as they are now. Callers enter the backend first."""


@runtime_checkable
class Environment(Protocol):
    """Answers a model's turns: tools, or a world that reads the text.

    Each request carries the whole episode before it. So whoever answers may be killed at any time, and playing again,
    from any turn, gives what was answered before. One that answers otherwise raises a `PermanentError`.
    """

    async def opening(self, problem: Problem, *, seed: int, deadline: float) -> str:
        """Return what follows the problem's text in its prompt; empty if there is nothing. Raises a `RequestError`."""

    async def act(
        self, problem: Problem, steps: Sequence[Step], action: Action, *, seed: int, deadline: float
    ) -> Observation:
        """Return what is answered to an action behind these steps. Raises a `RequestError`.

        What a tool raises is an answer; what the environment itself fails at is an error. Unreadable steps did nothing.
        """

    async def reward(self, problem: Problem, steps: Sequence[Step], *, seed: int, deadline: float) -> float | None:
        """Return what an episode of these steps is worth; None if the environment does not say."""


class Verifier(Protocol):
    """Judges whole responses. It never raises because of what a model wrote: that gets a verdict too."""

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict | Judgement:
        """Judge a whole response: `Verdict.TIMEOUT` or `Verdict.ERROR` where no verdict could be reached.

        A verifier with a number or a text to give returns a `Judgement`.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class PromptStages(Protocol):
    """The stages as one prompt's coroutine sees them. Priority, seed and deadline are already set for the prompt.

    Tokens that stages take and return end as the student's do, also a teacher's.
    """

    @property
    def student(self) -> Capabilities | None:
        """What the student's server offers. None if it was not asked: a policy may then use everything."""

    @property
    def teachers(self) -> Mapping[str, float]:
        """The names of the teachers that the prompt asks, with shares that add up to 1. An only one's name is empty."""

    @property
    def teacher(self) -> Capabilities | None:
        """What the prompt's teacher's server offers, or None as for the student; of several, what all of them offer."""

    async def rollout(
        self,
        *,
        n: int = 0,
        top_k: int = 0,
        prompt_ids: IntArray | None = None,
        prefix_ids: IntArray | Sequence[int] = (),
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
    ) -> Generation:
        """Sample the prompt's n-th response from the behaviour policy, with the top-k at each token.

        `prefix_ids` are tokens of the response, whoever wrote them: it continues with at most `max_tokens` and what
        they leave of `sampling.max_response_tokens`, and there is nothing to come after an end token. `stop` are
        tokens that end it beside the end tokens. What it writes behind other `prompt_ids` is `foreign`: it has no log
        pi_old of this prompt.
        """

    def teacher_prompt(self, *turns: ChatTurn | str, teacher: str = "") -> IntArray:
        """Return a prompt (P,) for the teacher, made of these turns by its chat template; a text is a user's turn.

        Here and below, `teacher` names one of several (`teachers.<name>`); it is empty for the prompt's only one.

        Its length counts against `PolicyNeeds.teacher_prompt_tokens`. It runs on the event loop: make contexts of many
        thousand tokens in a thread.
        """

    async def teacher_response(
        self,
        *,
        n: int = 0,
        prompt_ids: IntArray | None = None,
        prefix_ids: IntArray | Sequence[int] = (),
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        teacher: str = "",
    ) -> Generation:
        """Sample a response from the teacher, as `rollout` does from the student. No student sampled its tokens.

        `prompt_ids` are as in `score`.
        """

    async def score(
        self, response_ids: IntArray, *, top_k: int, prompt_ids: IntArray | None = None, teacher: str = ""
    ) -> TokenScores:
        """Score the response under the teacher. Its top-k are tokens that all models have.

        The teacher reads `prompt_ids` (P,) before it; None: what `prompt.teacher` says, or else the student's prompt.
        Raises `PermanentError` if they are longer than the policy's needs state.

        With `top_k` 0 only the response's own tokens and the entropies are wanted, and the top-k may hold anything.
        """

    async def score_at(
        self,
        response_ids: IntArray,
        positions: IntArray,
        *,
        top_k: int,
        prompt_ids: IntArray | None = None,
        teacher: str = "",
    ) -> ScoredPositions:
        """Score single positions under the teacher once more, with a wider top-k; see `PositionScorer`.

        Tokens that some model does not have are left out, so there may be fewer than `top_k`.
        """

    async def teacher_candidates(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        prompt_ids: IntArray | None = None,
        teacher: str = "",
    ) -> FloatArray:
        """Return the teacher's log-probabilities (N, k) of chosen tokens at response positions (N,).

        `prompt_ids` are as in `score`. The student's end token stands for the teacher's, whose other end tokens count
        as themselves. Tokens that some model does not have are refused: `common_vocabulary.common_candidates` leaves
        them out.
        """

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        """Return log-probabilities (T,) of the response under the frozen reference."""

    async def candidate_logprobs(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        version: WeightVersion | None = None,
    ) -> FloatArray:
        """Return the student's log-probabilities (N, k) of candidates at response positions (N,).

        `version` names the weights that sampled the response. A strict run asks of these. A run with staleness asks of
        the live weights, which may be newer, and so does None.
        """

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        """Sample the n-th continuation after `response_ids[:position], candidate_id`."""

    async def verify(self, response_ids: IntArray) -> Judgement:
        """Judge a whole response to this prompt. Missing evidence has already been asked for once more."""

    def written_response(self) -> Generation:
        """Return the problem's response in the data, with the student's end token. No student sampled its tokens.

        It is cut after `sampling.max_response_tokens`. Its log-probabilities are not known: they are 0. Raises
        `DataError` where there is none, or one that goes on after an end token.
        """

    def decode(self, token_ids: IntArray) -> str:
        """Return the text of response tokens without special tokens."""


class Policy(Protocol):
    """A method: one coroutine per prompt over the stages. It does no I/O and no scheduling of its own.

    A policy that cannot supervise every prompt is also a `ScheduleChecker`.
    """

    @property
    def needs(self) -> PolicyNeeds:
        """What it needs from the backends. This does not change during a run."""

    async def supervise(self, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
        """Run Algorithm 1 for one prompt; return its samples, one per trajectory.

        Errors of stages pass through: a `RequestError` gives up the prompt, a `BudgetSpentError` ends admission.
        """


@runtime_checkable
class ScheduleChecker(Protocol):
    """Checks the prompts of a run before anything starts. Optional, for a policy."""

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check all prompts of all epochs, in admission order. Raises ConfigError or DataError to refuse the run."""


@runtime_checkable
class Reviser(Protocol):
    """A policy with a second word: once the trainer has said what its student says of a batch."""

    def revise(self, batch: LiveBatch) -> Sequence[Sample]:
        """Return the batch's samples, in order, with other terms: what depends on the student in training.

        It may give other `pulls`, `advantages`, `policy_mask`, `soft_targets` and `entropy_bonus`, other metrics and
        records. A sample without supervision is left out. It is asked once an iteration, before the first update, and
        must be pure: after a resume it is asked again, and gives the same.
        """


@runtime_checkable
class Observer(Protocol):
    """A policy that is told how iterations went, and keeps what it makes of that in the run's checkpoints.

    `revise` of an iteration comes after the reports of all before it, and so does a strict run's `supervise`.
    Otherwise `supervise` may see any newer state.
    """

    def observe(self, report: IterationReport) -> None:
        """Take note of an iteration. It is told of each once, in order, before its weights are served and saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that it knows from reports, as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what it was when `state_dict` returned this, whatever it was told since."""


class Trainer(Protocol):
    """Trains on batches from the supervision queue and publishes new weights."""

    async def look(self, iteration: int, batch: Sequence[Supervision]) -> Sequence[Live]:
        """Return what the student says now of each of these samples. Iterations count from 0, and this one is due.

        Raises `TrainerError` as `train` does.
        """

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        """Train on one batch. Iterations count from 0.

        The new weights may be written later, beside the next step: `published` waits for them. Raises `TrainerError`
        when a rank stopped (non-finite loss, full disk, killed).
        """

    async def published(self, step: int) -> tuple[WeightFile, ...]:
        """Wait until the weights after `step` steps are on disk; return their files as they were then.

        Asked for each step once, in order. Raises `TrainerError` as `train` does.
        """

    async def save(self, step: int, directory: str) -> None:
        """Begin to save the state after `step` steps, at which the trainer is, into a directory.

        Training may continue at once. One save is under way at a time.
        """

    async def saved(self, step: int) -> float:
        """Wait until what `save` began is on disk; return its seconds. Raises `TrainerError` as `train` does."""
