"""Makes the stages of a run, and the view of them that one prompt's coroutine gets.

Here requests get their identity: priority and seeds from the prompt's ordinal, deadlines and retries from the stage,
prefixes and budgets from the method. So policies need none of that, and backends know nothing of
prompts.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from spot_async.base.events import Channel
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.seeds import derive_seed
from spot_async.base.waiting_room import Priority
from spot_async.config import StageConfig
from spot_async.errors import ContractError, DataError, PermanentError
from spot_async.models.alignment import branch_root
from spot_async.models.common_vocabulary import EndTokens, known_positions, with_summed_last
from spot_async.models.responses import first_tokens, foreign
from spot_async.models.vocabulary import stop_token_ids
from spot_async.protocols import CandidateScorer, Generator, PositionScorer, Scorer
from spot_async.replicas.leasing import ServicePool, pool_of
from spot_async.stages.plugin_contract import ask_judgement
from spot_async.stages.services import STAGE_SERVERS, STATED_BY, Services, StagesSettings, requests_per_prompt
from spot_async.stages.stage import Stage, StageLimits, UpdatePause
from spot_async.types import (
    Capabilities,
    ChatTurn,
    FinishReason,
    FloatArray,
    Generation,
    IntArray,
    Judgement,
    PolicyNeeds,
    Prompt,
    Sample,
    SamplingSettings,
    ScoredPositions,
    ScoreRequest,
    TokenScores,
    WeightVersion,
)

S = TypeVar("S")
T = TypeVar("T")


class TeacherCandidates(msgspec.Struct, frozen=True):
    """The teacher's answer about chosen tokens, in the form in which it is kept."""

    logprobs: FloatArray  # (N, k)


Kept = TypeVar("Kept", TokenScores, ScoredPositions, TeacherCandidates, Generation)


class Stages:
    """All stages of a run. `for_prompt` gives a policy its view."""

    def __init__(
        self, services: Services, settings: StagesSettings, needs: PolicyNeeds, events: Channel | None = None
    ) -> None:
        """Make the stages of a policy with these `needs`. `events`: the channel to publish on; None makes a new one."""
        self.services = services
        self.settings = settings
        self.events = events or Channel()
        own, teachers = services.vocabulary, services.teacher_vocabulary or services.vocabulary
        self.teacher_prompt_tokens = needs.teacher_prompt_tokens
        self.stop_token_ids = stop_token_ids(own, teachers)
        self.ends = EndTokens(own.end_token_ids, teachers.end_token_ids, settings.limits.score.end_token)
        self.student_pause = UpdatePause()
        jitter = random.Random(derive_seed(settings.seed, "retry jitter")).random

        standstill_s = WEIGHT_UPDATE_TIMEOUT_S if settings.weights_may_change else 0.0
        requests = requests_per_prompt(needs)

        def stage(name: str, service: S | ServicePool[S], config: StageConfig) -> Stage[S]:
            is_students = STAGE_SERVERS[name] == "student" or (name == "reference" and services.reference_is_base)
            limits = StageLimits(
                concurrency=config.concurrency,
                timeout_s=config.timeout_s,
                attempt_timeout_s=config.attempt_timeout_s,
                retry=settings.retry(config.attempts),
                waiting_capacity=settings.max_prompts * requests[name],
                requests_per_prompt=requests[name] if settings.bounds_prompts else None,
                stated_by=STATED_BY[name],
                longest_standstill_s=standstill_s if is_students else 0.0,
            )
            pause = self.student_pause if is_students else None
            return Stage(name, pool_of(service), limits, jitter=jitter, events=self.events, pause=pause)

        limits = settings.limits
        student: Any = services.student
        self.rollout: Stage[Generator] = stage("rollout", student, limits.rollout)
        self.score = stage("score", services.teacher, limits.score)
        self.candidates: Stage[CandidateScorer] = stage("candidates", student, limits.candidates)
        self.probe: Stage[Generator] = stage("probe", student, limits.probe)
        self.verify = stage("verify", services.verifier, limits.verify)
        self.writer: Any = services.teacher if needs.teacher_responses else None  # of the teacher's responses
        self.chooser = services.teacher if needs.teacher_candidates else None  # of the tokens that it scores
        self.teacher_response: Stage[Any] = stage("teacher_response", self.writer, limits.teacher_response)
        self.reference = stage("reference", services.reference, limits.reference)
        self.all: tuple[Stage[Any], ...] = (self.rollout, self.score, self.candidates, self.probe, self.verify)
        self.all += (self.teacher_response,) if self.writer is not None else ()
        self.all += (self.reference,) if services.reference is not None else ()

    @property
    def tokens_generated(self) -> int:
        """The tokens of all rollouts, probes and responses of the teacher so far."""
        return sum(stage.counters.work for stage in (self.rollout, self.probe, self.teacher_response))

    def for_prompt(self, prompt: Prompt) -> BoundStages:
        return BoundStages(self, prompt)


class BoundStages:
    """Gives one prompt's coroutine its stages: a `protocols.PromptStages`."""

    def __init__(self, stages: Stages, prompt: Prompt) -> None:
        self._stages = stages
        self._prompt = prompt
        # All requests of a prompt begin with its tokens. Those of probes and candidates continue with its response's.
        self._session = f"prompt-{prompt.ordinal}"
        # What the teacher read before each response, where that was not the student's prompt, by the response's ids.
        self._read_before: dict[bytes, list[IntArray]] = {}

    @property
    def student(self) -> Capabilities | None:
        return self._stages.services.capabilities.get("student")

    @property
    def teacher(self) -> Capabilities | None:
        return self._stages.services.capabilities.get("teacher")

    @property
    def ends(self) -> EndTokens:
        return self._stages.ends

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
        prefix = np.asarray(prefix_ids, np.int32)
        request = ("rollout", *_identity(n, prompt_ids, prefix))
        own_ids = self._prompt.token_ids
        read_ids = own_ids if prompt_ids is None else prompt_ids

        def generate(context_ids: IntArray, settings: SamplingSettings) -> Awaitable[Generation]:
            return self._generate(self._stages.rollout, (self._prompt.ordinal,), context_ids, settings, top_k=top_k)

        response = await self._continued(request, read_ids, prefix, max_tokens=max_tokens, stop=stop, generate=generate)
        # Its log pi_old are those behind another prompt.
        return response if np.array_equal(read_ids, own_ids) else foreign(response)

    def teacher_prompt(self, *turns: ChatTurn | str) -> IntArray:
        if (render := self._stages.services.render_turns) is None:
            raise ContractError("the policy makes a prompt for the teacher, and these services have no render_turns")
        return render([ChatTurn(role="user", content=turn) if isinstance(turn, str) else turn for turn in turns])

    async def teacher_response(
        self,
        *,
        n: int = 0,
        prompt_ids: IntArray | None = None,
        prefix_ids: IntArray | Sequence[int] = (),
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
    ) -> Generation:
        ends, prefix = self._stages.ends, np.asarray(prefix_ids, np.int32)
        request = ("teacher response", *_identity(n, prompt_ids, prefix))
        read_ids = self._read_by_teacher(prompt_ids)
        stage = _given(self._stages.teacher_response, self._stages.writer, "teacher_responses")

        def generate(context_ids: IntArray, settings: SamplingSettings) -> Awaitable[Generation]:
            # Without the seed: runs that differ in it share what a teacher wrote.
            ends = np.array(settings.stop_token_ids, np.int32)
            asked = (context_ids, n, settings.max_tokens, settings.top_p, ends, settings.vocab_limit)
            return self._kept(
                Generation, asked, lambda: self._generate(stage, (self._prompt.ordinal,), context_ids, settings)
            )

        response = await self._continued(
            request,
            read_ids,
            ends.swapped(prefix),
            max_tokens=max_tokens,
            stop=ends.swapped(np.asarray(stop, np.int32)).tolist(),
            generate=generate,
        )
        response = foreign(msgspec.structs.replace(response, token_ids=ends.swapped(response.token_ids)))
        self._note_read(read_ids, response.token_ids)
        return response

    async def _continued(
        self,
        request: tuple[int | str, ...],
        prompt_ids: IntArray,
        prefix_ids: IntArray,
        *,
        max_tokens: int | None,
        stop: Sequence[int],
        generate: Callable[[IntArray, SamplingSettings], Awaitable[Generation]],
    ) -> Generation:
        """Sample what comes after a prefix of the response: nothing, if it ended or leaves no room."""
        room = self._stages.settings.sampling.max_response_tokens - len(prefix_ids)
        most = room if max_tokens is None else min(room, max_tokens)
        if len(prefix_ids) and int(prefix_ids[-1]) in self._stages.stop_token_ids:
            return _nothing("stop")
        if most <= 0:
            return _nothing("length")
        settings = self._settings(most, *request)
        stops = tuple(dict.fromkeys((*settings.stop_token_ids, *stop)))
        settings = msgspec.structs.replace(settings, stop_token_ids=stops)
        context_ids = np.concatenate([prompt_ids, prefix_ids], dtype=np.int32) if len(prefix_ids) else prompt_ids
        return await generate(context_ids, settings)

    async def score(self, response_ids: IntArray, *, top_k: int, prompt_ids: IntArray | None = None) -> TokenScores:
        read_ids = self._read_by_teacher(prompt_ids)
        common, widest = self._stages.services.common, self.teacher.max_top_k if self.teacher is not None else None
        scores = await self._scored(read_ids, response_ids, top_k=max(1, top_k))
        if (wider := common.wider(scores, top_k, widest)) is not None:
            scores = await self._scored(read_ids, response_ids, top_k=wider)
        self._note_read(read_ids, response_ids)
        return common.known_to_all(scores, top_k)

    async def _scored(self, read_ids: IntArray, response_ids: IntArray, *, top_k: int) -> TokenScores:
        scored_ids = self._stages.ends.as_teachers(response_ids)
        added_ids = self._stages.ends.summed_with_last(response_ids)
        stage = _given(self._stages.score, self._stages.services.teacher, "teacher_top_k")

        async def score(scorer: Scorer, request: ScoreRequest) -> TokenScores:
            scores = await scorer.score(request, top_k=top_k)
            if not len(added_ids):
                return scores
            logprobs = await _scoring_candidates(scorer).candidate_logprobs(
                request,
                np.array([len(scored_ids) - 1], np.int32),
                added_ids[np.newaxis],
                expected_version=scores.version,
            )
            return with_summed_last(scores, logprobs[0])

        scores = await self._kept(
            TokenScores,
            (read_ids, scored_ids, top_k, *([added_ids] if len(added_ids) else [])),
            lambda: self._ask(stage, read_ids, scored_ids, score),
        )
        return msgspec.structs.replace(scores, topk_ids=self._stages.ends.swapped(scores.topk_ids))

    async def score_at(
        self, response_ids: IntArray, positions: IntArray, *, top_k: int, prompt_ids: IntArray | None = None
    ) -> ScoredPositions:
        read_ids = self._read_by_teacher(prompt_ids)
        scored_ids = self._stages.ends.as_teachers(response_ids)
        stage = _given(self._stages.score, self._stages.services.teacher, "teacher_top_k")
        rows = await self._kept(
            ScoredPositions,
            (read_ids, scored_ids, top_k, positions),
            lambda: self._ask(
                stage,
                read_ids,
                scored_ids,
                lambda scorer, request: _scoring_positions(scorer).score_at(request, positions, top_k=top_k),
                times=len(positions),
                kind="score_at",  # positions share prefixes, so a token takes far less time than in `score`
            ),
        )
        self._note_read(read_ids, response_ids)
        rows = msgspec.structs.replace(rows, topk_ids=self._stages.ends.swapped(rows.topk_ids))
        limit = self._stages.services.common.limit
        return rows if limit is None else known_positions(rows, limit)

    async def teacher_candidates(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        prompt_ids: IntArray | None = None,
    ) -> FloatArray:
        ends, limit = self._stages.ends, self._stages.services.common.limit
        if limit is not None and candidate_ids.max(initial=0) >= limit:
            raise ContractError(
                f"the policy asks teacher_candidates about token {candidate_ids.max()}, and only those below {limit} "
                "are common to all models: leave others out by `common_candidates`; they belong to the tail"
            )
        scored_ids, asked_ids = ends.as_teachers(response_ids), ends.swapped(candidate_ids)
        read_ids = self._read_by_teacher(prompt_ids)
        stage = _given(self._stages.score, self._stages.chooser, "teacher_candidates")

        async def choose(scorer: Scorer, request: ScoreRequest) -> TeacherCandidates:
            return TeacherCandidates(
                await _scoring_candidates(scorer).candidate_logprobs(
                    request, positions, asked_ids, expected_version=None
                )
            )

        answer = await self._kept(
            TeacherCandidates,
            (read_ids, scored_ids, positions, asked_ids),
            lambda: self._ask(stage, read_ids, scored_ids, choose, kind="teacher_candidates"),
        )
        self._note_read(read_ids, response_ids)
        return answer.logprobs

    async def _kept(
        self, kind: type[Kept], asked: tuple[IntArray | float | None, ...], ask: Callable[[], Awaitable[Kept]]
    ) -> Kept:
        """Return the teacher's answer. Where the cache has it, this takes no turn and sends no request."""
        kept, prompt = self._stages.services.kept_scores, self._prompt
        if kept is None:
            return await ask()
        key = (*asked, self._stages.settings.sampling.temperature)
        return await kept.fetch(kind, key, ask, what=f"prompt {prompt.ordinal} (problem {prompt.problem.id!r})")

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        services = self._stages.services

        def score(reference: Any, request: ScoreRequest) -> Awaitable[TokenScores]:
            ask = reference.score_base if services.reference_is_base else reference.score
            scores: Awaitable[TokenScores] = ask(request, top_k=1)
            return scores

        stage = _given(self._stages.reference, services.reference, "reference")
        scores = await self._ask(stage, self._prompt.token_ids, response_ids, score)
        if scores.valid is not None and not scores.valid.all():
            raise PermanentError(
                f"reference.backend gave no log-probabilities of {int((~scores.valid).sum())} of {len(scores.valid)} "
                "tokens, and a reference needs all of them: set reference.backend to a server that names tokens by id"
            )
        return scores.logprobs

    async def candidate_logprobs(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        version: WeightVersion | None = None,
    ) -> FloatArray:
        expected = None if self._stages.settings.weights_may_change else version
        return await self._ask(
            self._stages.candidates,
            self._prompt.token_ids,
            response_ids,
            lambda student, request: student.candidate_logprobs(
                request, positions, candidate_ids, expected_version=expected
            ),
        )

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        budget = self._stages.settings.sampling.max_response_tokens - position - 1
        if budget <= 0 or candidate_id in self._stages.stop_token_ids:
            return _nothing("stop")  # the branch is verified as it stands
        return await self._generate(
            self._stages.probe,
            (self._prompt.ordinal, position),
            branch_root(self._prompt.token_ids, response_ids, position, candidate_id),
            self._settings(budget, "probe", position, candidate_id, n),
        )

    async def verify(self, response_ids: IntArray) -> Judgement:
        return await ask_judgement(
            self._stages.verify,
            (self._prompt.ordinal,),
            self._prompt.problem,
            self.decode(response_ids),
        )

    def with_teacher_prompts(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples, in their records what the teacher read where that was not the student's prompt."""
        return [self._with_teacher_prompt(sample) for sample in samples] if self._read_before else samples

    def _with_teacher_prompt(self, sample: Sample) -> Sample:
        ids = sample.record.get("response_ids") if sample.supervision is None else sample.supervision.response_ids
        read = self._read_before.get(_content(ids)) if isinstance(ids, np.ndarray) else None
        if read is None:
            return sample
        texts = dict.fromkeys(map(self._stages.services.vocabulary.whole_text, read))
        return msgspec.structs.replace(sample, record={**sample.record, "teacher_prompt": "\n\n".join(texts)})

    def _note_read(self, read_ids: IntArray, response_ids: IntArray) -> None:
        if not np.array_equal(read_ids, self._prompt.token_ids):
            self._read_before.setdefault(_content(response_ids), []).append(read_ids)

    def written_response(self) -> Generation:
        problem, ends = self._prompt.problem, self._stages.stop_token_ids
        if not problem.response:
            raise DataError(f"problem {problem.id!r} has no response: name its column in data.train.fields.response")
        token_ids = self._stages.services.vocabulary.encode(problem.response)
        passed = np.flatnonzero(np.isin(token_ids[:-1], ends))
        if len(passed):
            raise DataError(
                f"problem {problem.id!r}: its response goes on after an end token, its token {passed[0] + 1} of "
                f"{len(token_ids)}: correct the row"
            )
        if not np.isin(token_ids[-1:], ends).any():
            token_ids = np.append(token_ids, np.int32(self._stages.ends.ours))
        written = Generation(
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            finish_reason="stop",
            version_spans=(),
        )
        return first_tokens(foreign(written), self._stages.settings.sampling.max_response_tokens)

    def decode(self, token_ids: IntArray) -> str:
        return self._stages.services.vocabulary.decode(token_ids)

    def _generate(
        self,
        stage: Stage[Generator],
        priority: Priority,
        prefix_ids: IntArray,
        settings: SamplingSettings,
        *,
        top_k: int = 0,
    ) -> Coroutine[Any, Any, Generation]:
        return stage.ask(
            priority,
            lambda generator, deadline: generator.generate(
                prefix_ids, settings, top_k=top_k, session=self._session, deadline=deadline
            ),
            session=self._session,
            tokens=len(prefix_ids) + settings.max_tokens,
            work=_tokens_generated,
        )

    def _ask(
        self,
        stage: Stage[S],
        read_ids: IntArray,
        response_ids: IntArray,
        score: Callable[[S, ScoreRequest], Awaitable[T]],
        *,
        times: int = 1,
        kind: str = "",
    ) -> Coroutine[Any, Any, T]:
        """Ask about a response behind what is read before it, so many `times` as a server counts its tokens."""
        temperature = self._stages.settings.sampling.temperature
        return stage.ask(
            (self._prompt.ordinal,),
            lambda server, deadline: score(server, ScoreRequest(read_ids, response_ids, temperature, deadline)),
            session=self._session,
            tokens=times * (len(read_ids) + len(response_ids)),
            kind=kind,
        )

    def _read_by_teacher(self, prompt_ids: IntArray | None) -> IntArray:
        """Return what the teacher reads before a response: the ids that a policy gives, or the prompt's."""
        if prompt_ids is None:
            return self._prompt.read_by_teacher
        stated = self._stages.teacher_prompt_tokens
        if len(prompt_ids) > max(stated, len(self._prompt.token_ids), len(self._prompt.read_by_teacher)):
            raise (PermanentError if stated else ContractError)(
                f"a teacher's prompt has {len(prompt_ids)} tokens, and PolicyNeeds.teacher_prompt_tokens states "
                f"{stated}: write it shorter, or state more"
            )
        return prompt_ids

    def _settings(self, max_tokens: int, *request: int | str) -> SamplingSettings:
        sampling = self._stages.settings.sampling
        return SamplingSettings(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            stop_token_ids=self._stages.stop_token_ids,
            seed=derive_seed(self._stages.settings.seed, self._prompt.ordinal, *request),
            vocab_limit=self._stages.services.common.limit,
        )


def _given(stage: Stage[T | None], service: object, need: str) -> Stage[T]:
    """Return a stage that only some policies use. Raise ContractError if the policy's needs do not state it."""
    if service is None:
        raise ContractError(f"the policy asks for what its needs do not state: {need}")
    return cast("Stage[T]", stage)


def _scoring_positions(scorer: Scorer) -> PositionScorer:
    if not isinstance(scorer, PositionScorer):
        raise ContractError("the policy asks the teacher for single positions, which its backend does not offer")
    return scorer


def _scoring_candidates(scorer: Scorer) -> CandidateScorer:
    if not isinstance(scorer, CandidateScorer):
        raise LookupError(
            "the policy, or stages.score.end_token=sum, asks the teacher for chosen tokens, which its backend does not "
            "offer"
        )
    return scorer


def _tokens_generated(generation: Generation) -> int:
    return len(generation.token_ids)


def _identity(n: int, prompt_ids: IntArray | None, prefix_ids: IntArray) -> Iterator[int | str]:
    """Yield what decides the seed of a response beside its prompt: its number, and what it continues."""
    if n:  # the first sample's seed is the same whatever the group's size
        yield n
    for name, token_ids in (("prompt", prompt_ids), ("prefix", prefix_ids)):
        if token_ids is not None and len(token_ids):
            yield f"{name} {hashlib.blake2b(_content(token_ids), digest_size=8).hexdigest()}"


def _content(token_ids: IntArray) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()


@functools.cache
def _nothing(finish_reason: FinishReason) -> Generation:
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason=finish_reason,
        version_spans=(),
    )
