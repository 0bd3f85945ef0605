"""Runs a policy over simulated services on virtual time, from prompts to trained batches.

    run = simulated_run(make_policy(MyPolicy, temperature=2.0), iterations=3)
    assert len(run.batches) == 3

Orchestrator and stages are the real ones. Everything else has a default; a test gives only what it changes.

`ScriptedStages` stands in for the stages of one prompt, with answers that a test chooses, to see what a policy makes of
them. Give `token_scores` the entropy and the candidates too, if the policy looks at them:

    stages = ScriptedStages(generation([5, 6, 1], logprobs=[-1.0, -2.0, -0.5]), token_scores([-0.5, -3.0, -0.5]))
    (sample,) = await policy.supervise(prompt, stages)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from typing import Any, ClassVar

import msgspec
import numpy as np

from spot_async.base.events import Event
from spot_async.config import SamplingConfig
from spot_async.errors import RequestError
from spot_async.loop.events import Evaluated, IterationFinished, PromptEnded, RunEvent
from spot_async.loop.orchestrator import Orchestrator, OrchestratorSettings
from spot_async.loop.publishing import LiveStudent
from spot_async.loop.resuming import Records
from spot_async.models.common_vocabulary import tails_with
from spot_async.models.episodes import Tools
from spot_async.models.responses import foreign
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Policy, Trainer
from spot_async.stages.services import Services, StagesSettings, TeacherService
from spot_async.stages.stages import Stages, stages_for
from spot_async.testing.services import (
    END_TOKEN,
    VOCAB_SIZE,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
    generation,
    token_scores,
)
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import (
    Capabilities,
    ChatTurn,
    FloatArray,
    Generation,
    IntArray,
    Judgement,
    PolicyContext,
    PolicyNeeds,
    Problem,
    Prompt,
    Sample,
    ScoredPositions,
    Supervision,
    TokenScores,
    Verdict,
    WeightVersion,
    place_in_run,
)

PROBLEMS = 32
MAX_RESPONSE_TOKENS = 64
WRITTEN_TOKENS = 12  # of the response that each problem has


class SimulatedTokenizer:
    """What policies and stages ask of a tokenizer. `text` returns an id's text, which is its number by default."""

    all_special_ids = (0, END_TOKEN)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, vocab_size: int = VOCAB_SIZE, text: Callable[[int], str] = str) -> None:
        self._vocab_size = vocab_size
        self._text = text

    def get_vocab(self) -> dict[str, int]:
        return {f"token-{token_id}": token_id for token_id in range(self._vocab_size)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that consists of their numbers."""
        return [int(number) for number in text.split()]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Special tokens have one too, so that two responses never have the same text."""
        return " ".join(self._text(int(token_id)) for token_id in token_ids)


def simulated_vocabulary(end_token_ids: tuple[int, ...] = (END_TOKEN,), text: Callable[[int], str] = str) -> Vocabulary:
    tokenizer: Any = SimulatedTokenizer(text=text)
    return Vocabulary(tokenizer, end_token_ids)


def simulated_turn_ids(turns: Sequence[ChatTurn | str], tools: Tools = ()) -> IntArray:
    """Return ids that stand for a prompt of these turns: one for each word, and one that ends it."""
    text = " ".join(turn if isinstance(turn, str) else turn.content for turn in turns)
    return np.array([2 + zlib.crc32(word.encode()) % (VOCAB_SIZE - 2) for word in [*text.split(), "\n"]], np.int32)


def policy_context(**changes: Any) -> PolicyContext:
    """Return what a policy is told about a simulated run, whose responses have no box."""
    given = {"vocab_size": VOCAB_SIZE, "tokenizer": SimulatedTokenizer(), "answer_start": lambda text: None}
    return PolicyContext(**{**given, **changes})


def make_policy(policy: Any, context: PolicyContext | None = None, **settings: Any) -> Any:
    """Make a policy of this class with these settings. `kind` may be left out, unlike in a configuration."""
    return policy(_settings_of(policy, settings), context or policy_context())


def make_verifier(verifier: Any, **settings: Any) -> Any:
    """Make a verifier of this class with these settings, as `make_policy` does. Enter it where a run would."""
    return verifier(_settings_of(verifier, settings))


def _settings_of(plugin: Any, settings: dict[str, Any]) -> Any:
    kind = {"kind": plugin.__name__} if plugin.Settings.model_fields["kind"].is_required() else {}
    return plugin.Settings(**kind, **settings)


def simulated_prompts(limit: int | None = None, *, problems: int = PROBLEMS, answer: str = "1") -> Iterator[Prompt]:
    """Return prompts, without end by default. Each epoch has every problem, and the n-th has 5 + n tokens."""
    for ordinal in count() if limit is None else range(limit):
        index = ordinal % problems
        written = " ".join(str(2 + (index + place) % (VOCAB_SIZE - 2)) for place in range(WRITTEN_TOKENS))
        problem = Problem(id=f"p{index}", text=f"problem {index}", answer=answer, response=written)
        token_ids = (2 + np.arange(5 + index) % (VOCAB_SIZE - 2)).astype(np.int32)
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=token_ids)


@dataclass
class Journal:
    """A listener that keeps finished iterations, evaluations, and the prompts that were given up."""

    results: list[IterationFinished] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    dead: dict[int, RequestError] = field(default_factory=dict)  # by the prompt's ordinal

    def on(self, event: Event) -> None:
        match event:
            case IterationFinished():
                self.results.append(event)
            case Evaluated():
                self.evaluated.append(event)
            case PromptEnded(prompt=prompt, error=RequestError() as error):
                self.dead[prompt.ordinal] = error


@dataclass(frozen=True, eq=False, repr=False)
class SimulatedRun:
    """A run that was made or has ended: its parts, and its results so far."""

    orchestrator: Orchestrator
    trainer: Any
    journal: Journal

    @property
    def stages(self) -> Stages:
        return self.orchestrator.stages

    @property
    def batches(self) -> list[list[Supervision]]:
        """What the trainer got, as a list for each iteration."""
        batches: list[list[Supervision]] = self.trainer.batches
        return batches

    @property
    def trained(self) -> list[Supervision]:
        """What the trainer got, as one list."""
        return [supervision for batch in self.batches for supervision in batch]

    @property
    def samples(self) -> list[Sample]:
        """The samples of finished iterations, including those that were left out of training."""
        return [sample for result in self.journal.results for sample in result.samples]

    def finish(self) -> SimulatedRun:
        """Run on virtual time to the end, and return this run. Raises what ended it early."""
        run_on_virtual_time(self.orchestrator.run())
        return self


def simulated_services(needs: PolicyNeeds, **changes: Any) -> Services:
    """Return services of a policy with these needs: simulated ones, but for `changes`."""
    simulated = {
        "student": SimulatedStudent(),
        "verifier": SimulatedVerifier(),
        "vocabulary": simulated_vocabulary(),
        "teachers": {
            name: TeacherService(server=SimulatedTeacher(name=name), render_turns=simulated_turn_ids)
            for name in needs.teachers or ([""] if needs.teacher else [])
        },
        "reference": SimulatedTeacher() if needs.reference else None,
    }
    return Services(**{**simulated, **changes})


def make_run(
    policy: Policy, *, prompts: Iterable[Prompt] | None = None, trainer: Trainer | None = None, **changes: Any
) -> SimulatedRun:
    """Make a run that has not begun. With real services it runs in real time: `await run.orchestrator.run()`.

    `changes` are fields of `Services`, `StagesSettings`, `LiveStudent`, `Records` and `OrchestratorSettings`; None
    leaves the default. By default, there are a teacher and a reference if the policy needs them, and the student takes
    the weights. `run.stages.events.subscribe(listener)` lets others listen too.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    journal, trainer = Journal(), SimulatedTrainer() if trainer is None else trainer
    services = simulated_services(policy.needs, **_taken(changes, Services))
    batch_size, staleness = changes.get("batch_size", 16), changes.get("max_staleness", 0)
    settings = {
        "sampling": SamplingConfig(max_response_tokens=MAX_RESPONSE_TOKENS),
        "max_prompts": changes.get("capacity_prompts", (1 + staleness) * batch_size),
        "weights_may_change": staleness > 0,
        **_taken(changes, StagesSettings),
    }
    stages = stages_for(policy, services, StagesSettings(**settings))
    stages.events.subscribe(journal, to=RunEvent)
    student = LiveStudent(**{"weight_sinks": [services.student], **_taken(changes, LiveStudent)})
    records = Records(**_taken(changes, Records))
    numbers = {
        "iterations": 2,
        "batch_size": batch_size,
        "max_staleness": staleness,
        "capacity_prompts": stages.settings.max_prompts,
        "capacity_bytes": 1 << 30,
        "max_response_tokens": stages.settings.sampling.max_response_tokens,
        "vocab_size": VOCAB_SIZE,
        "weight_update_timeout_s": 60.0,
        "max_dead_share": 0.1,
        **changes,
    }
    when = partial(place_in_run, batch_size=batch_size, iterations=numbers["iterations"])
    placed = (msgspec.structs.replace(each, **when(each.ordinal)) for each in simulated_prompts())
    orchestrator = Orchestrator(
        OrchestratorSettings(**numbers),
        prompts=placed if prompts is None else prompts,
        policy=policy,
        stages=stages,
        trainer=trainer,
        student=student,
        records=records,
    )
    return SimulatedRun(orchestrator, trainer, journal)


def _taken(changes: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Take what names fields of this dataclass out of `changes`."""
    return {each.name: changes.pop(each.name) for each in fields(kind) if each.name in changes}


def simulated_run(policy: Policy, **changes: Any) -> SimulatedRun:
    """Make a run with these `changes`, and run it on virtual time."""
    return make_run(policy, **changes).finish()


class ScriptedStages:
    """`protocols.PromptStages` that give the same response and scores each time, and note what they were asked."""

    student: Capabilities | None = None  # None: it is not known what servers offer, so a policy asks for exact values
    teacher: Capabilities | None = None

    def __init__(
        self,
        response: Generation | None = None,
        scores: TokenScores | None = None,
        *,
        verdict: Verdict | Judgement = Verdict.WRONG,
        verdicts: Mapping[tuple[int, ...], Verdict | Judgement] | None = None,
        teachers: Mapping[str, TokenScores] | None = None,
    ) -> None:
        """`verdicts` are by the token ids of a whole response or branch; all others get `verdict`.

        `teachers` are the scores of several by name, in place of `scores`.
        """
        self.response = response or generation([END_TOKEN])
        self.scores = scores or token_scores(np.zeros(len(self.response.token_ids)))
        self.candidates: list[tuple[list[int], list[list[int]]]] = []  # positions and ids the student was asked about
        self.probed: list[tuple[int, int, int]] = []  # position, candidate and number of each probe
        self.verified: list[tuple[int, ...]] = []
        self.teachers_asked: list[str] = []  # the name in each request to a teacher
        self._verdict = verdict
        self._verdicts = verdicts or {}
        self._teachers = teachers
        names = teachers or {"": self.scores}
        self.teachers: Mapping[str, float] = {name: 1 / len(names) for name in names}

    async def rollout(self, **asked: Any) -> Generation:
        return self.response

    def teacher_prompt(self, *turns: ChatTurn | str, teacher: str = "") -> IntArray:
        return simulated_turn_ids(turns)

    async def teacher_response(self, **asked: Any) -> Generation:
        self._scores_of(**asked)
        return foreign(self.response)

    async def score(self, response_ids: IntArray, *, top_k: int, **asked: Any) -> TokenScores:
        scores = self._scores_of(**asked)
        logprobs = scores.topk_logprobs
        return msgspec.structs.replace(
            scores,
            topk_ids=scores.topk_ids[:, :top_k],
            topk_logprobs=logprobs[:, :top_k],
            tail_logprobs=tails_with(scores.tail_logprobs, logprobs[:, top_k:]),
        )

    async def score_at(
        self, response_ids: IntArray, positions: IntArray, *, top_k: int, **asked: Any
    ) -> ScoredPositions:
        scores = self._scores_of(**asked)
        return ScoredPositions(
            topk_ids=scores.topk_ids[positions, :top_k],
            topk_logprobs=scores.topk_logprobs[positions, :top_k],
            entropy_lower=scores.entropy_lower[positions],
            entropy_upper=scores.entropy_upper[positions],
        )

    async def teacher_candidates(
        self, response_ids: IntArray, positions: IntArray, candidate_ids: IntArray, **asked: Any
    ) -> FloatArray:
        """Return a probability of one in ten for every candidate."""
        self._scores_of(**asked)
        return np.full(candidate_ids.shape, np.log(0.1), np.float32)

    def _scores_of(self, *, teacher: str = "", **others: Any) -> TokenScores:
        """Note a request to a teacher, and return its scores."""
        self.teachers_asked.append(teacher)
        return self.scores if self._teachers is None else self._teachers[teacher]

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        return self.response.logprobs

    async def candidate_logprobs(
        self, response_ids: IntArray, positions: IntArray, candidate_ids: IntArray, version: WeightVersion | None = None
    ) -> FloatArray:
        """Return a probability of one in twenty for every candidate."""
        assert version is None or version == self.response.version_spans[-1].version
        self.candidates.append((positions.tolist(), candidate_ids.tolist()))
        return np.full(candidate_ids.shape, np.log(0.05), np.float32)

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        """Return the n-th continuation after a candidate, which is the token 20 + n and then the end."""
        self.probed.append((position, candidate_id, n))
        return generation([20 + n, END_TOKEN])

    async def verify(self, response_ids: IntArray) -> Judgement:
        token_ids = tuple(response_ids.tolist())
        self.verified.append(token_ids)
        judged = self._verdicts.get(token_ids, self._verdict)
        return judged if isinstance(judged, Judgement) else Judgement(judged)

    def written_response(self) -> Generation:
        return foreign(self.response)

    def decode(self, token_ids: IntArray) -> str:
        return " ".join(map(str, token_ids.tolist()))
