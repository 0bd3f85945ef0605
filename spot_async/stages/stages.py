"""Makes the stages of a run, and the view of them that one prompt's coroutine gets.

Here requests get their identity: priority and seeds from the prompt's ordinal, deadlines and retries from the stage,
prefixes and budgets from the method. So policies need none of that, and backends know nothing of
prompts.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from spot_async.base.events import Channel
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S, RetryPolicy
from spot_async.base.seeds import derive_seed
from spot_async.base.waiting_room import Priority
from spot_async.config import SamplingConfig, StageConfig, StagesConfig
from spot_async.errors import PermanentError
from spot_async.models.alignment import branch_root
from spot_async.models.common_vocabulary import CommonVocabulary, EndTokens, known_positions, with_summed_last
from spot_async.models.vocabulary import Vocabulary, stop_token_ids
from spot_async.protocols import CandidateScorer, Generator, PositionScorer, Scorer
from spot_async.replicas.leasing import ServicePool, pool_of
from spot_async.spending.teacher_cache import KeptScores
from spot_async.stages.gate import Gate
from spot_async.stages.services import STAGE_SERVERS, Services, requests_per_prompt
from spot_async.stages.stage import Stage
from spot_async.stages.verdicts import ask_verdict
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    Prompt,
    SamplingSettings,
    ScoredPositions,
    ScoreRequest,
    TokenScores,
    Verdict,
    WeightVersion,
)

S = TypeVar("S")
T = TypeVar("T")
Kept = TypeVar("Kept", TokenScores, ScoredPositions)


class Stages:
    """All stages of a run. `for_prompt` gives a policy its view."""

    def __init__(
        self,
        services: Services,
        config: StagesConfig,
        sampling: SamplingConfig,
        *,
        student: Vocabulary,
        teacher: Vocabulary,
        run_seed: int,
        max_running_prompts: int,
        max_probes_per_prompt: int,
        max_samples_per_prompt: int = 1,
        retry: Callable[[int], RetryPolicy] = RetryPolicy,
        common: CommonVocabulary | None = None,
        capabilities: Mapping[str, Capabilities] | None = None,
        kept_scores: KeptScores | None = None,
        weights_may_change: bool = False,
        events: Channel | None = None,
    ) -> None:
        """Make the stages of a run whose services are known.

        * `retry` makes a stage's retry policy from its `attempts`.
        * `common`: None where all softmaxes are equally wide.
        * `capabilities`: what the servers offer, by role. A role that is missing may be asked for everything.
        * `kept_scores`: the teacher's scores that are kept, if any are.
        * `weights_may_change`: the student may get new weights while a prompt is under way. So candidates are asked of
          the weights that its servers hold then, and deadlines are put off while they load.
        * `events`: the channel to publish on; None makes a new one.
        """
        self.services = services
        self.sampling = sampling
        self.run_seed = run_seed
        self.vocabulary = student
        self.common = common or CommonVocabulary()
        self.capabilities = capabilities or {}
        self.kept_scores = kept_scores
        self.weights_may_change = weights_may_change
        self.events = events or Channel()
        self.stop_token_ids = stop_token_ids(student, teacher)
        self.ends = EndTokens(student.end_token_ids, teacher.end_token_ids, config.score.end_token)
        self.student_gate = Gate()  # closed while the student's servers are drained
        jitter = random.Random(derive_seed(run_seed, "retry jitter")).random

        standstill_s = WEIGHT_UPDATE_TIMEOUT_S if weights_may_change else 0.0
        requests = requests_per_prompt(samples=max_samples_per_prompt, probes=max(1, max_probes_per_prompt))

        def stage(name: str, service: S | ServicePool[S], stage_config: StageConfig) -> Stage[S]:
            is_students = STAGE_SERVERS[name] == "student" or (name == "reference" and services.reference_is_base)
            return Stage(
                name,
                pool_of(service),
                concurrency=stage_config.concurrency,
                timeout_s=stage_config.timeout_s,
                attempt_timeout_s=stage_config.attempt_timeout_s,
                retry=retry(stage_config.attempts),
                mailbox_capacity=max_running_prompts * requests[name],
                jitter=jitter,
                longest_standstill_s=standstill_s if is_students else 0.0,
                events=self.events,
                gate=self.student_gate if is_students else None,
            )

        self.rollout = stage("rollout", services.generator, config.rollout)
        self.score = stage("score", services.scorer, config.score)
        self.candidates = stage("candidates", services.candidate_scorer, config.candidates)
        self.probe = stage("probe", services.generator, config.probe)
        self.verify = stage("verify", services.verifier, config.verify)
        self.teacher_response = stage("teacher_response", services.teacher_generator, config.teacher_response)
        self.reference = stage("reference", services.reference, config.reference)
        used: list[Stage[Any]] = [self.rollout, self.score, self.candidates, self.probe, self.verify]
        used += [self.teacher_response] if services.teacher_generator is not None else []
        used += [self.reference] if services.reference is not None else []
        self.all = tuple(used)

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
        # All requests of a prompt begin with its tokens, and those of probes and candidates go on with its response's.
        self._session = f"prompt-{prompt.ordinal}"

    @property
    def student(self) -> Capabilities | None:
        return self._stages.capabilities.get("student")

    @property
    def teacher(self) -> Capabilities | None:
        return self._stages.capabilities.get("teacher")

    @property
    def ends(self) -> EndTokens:
        return self._stages.ends

    async def rollout(self, *, n: int = 0, top_k: int = 0) -> Generation:
        nth = (n,) if n else ()  # the first sample's seed is the same whatever the group's size
        return await self._generate(
            self._stages.rollout,
            (self._prompt.ordinal,),
            self._prompt.token_ids,
            self._settings(self._stages.sampling.max_response_tokens, "rollout", *nth),
            top_k=top_k,
        )

    async def teacher_response(self) -> Generation:
        response = await self._generate(
            _given(self._stages.teacher_response, self._stages.services.teacher_generator, "teacher_responses"),
            (self._prompt.ordinal,),
            self._prompt.token_ids,
            self._settings(self._stages.sampling.max_response_tokens, "teacher response"),
        )
        return msgspec.structs.replace(response, token_ids=self._stages.ends.swapped(response.token_ids))

    async def score(self, response_ids: IntArray, *, top_k: int) -> TokenScores:
        common, widest = self._stages.common, self.teacher.max_top_k if self.teacher is not None else None
        scores = await self._scored(response_ids, top_k=max(1, top_k))
        if (wider := common.wider(scores, top_k, widest)) is not None:
            scores = await self._scored(response_ids, top_k=wider)
        return common.known_to_all(scores, top_k)

    async def _scored(self, response_ids: IntArray, *, top_k: int) -> TokenScores:
        scored_ids = self._stages.ends.as_teachers(response_ids)
        added_ids = self._stages.ends.summed_with_last(response_ids)
        stage = _given(self._stages.score, self._stages.services.scorer, "teacher_top_k")

        async def score(scorer: Scorer, deadline: float) -> TokenScores:
            request = self._request(scored_ids, deadline)
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
            (scored_ids, top_k, *([added_ids] if len(added_ids) else [])),
            lambda: stage.ask(
                (self._prompt.ordinal,), score, session=self._session, tokens=self._tokens_with(scored_ids)
            ),
        )
        return msgspec.structs.replace(scores, topk_ids=self._stages.ends.swapped(scores.topk_ids))

    async def score_at(self, response_ids: IntArray, positions: IntArray, *, top_k: int) -> ScoredPositions:
        scored_ids = self._stages.ends.as_teachers(response_ids)
        stage = _given(self._stages.score, self._stages.services.scorer, "teacher_top_k")
        rows = await self._kept(
            ScoredPositions,
            (scored_ids, top_k, positions),
            lambda: stage.ask(
                (self._prompt.ordinal,),
                lambda scorer, deadline: _scoring_positions(scorer).score_at(
                    self._request(scored_ids, deadline), positions, top_k=top_k
                ),
                session=self._session,
                tokens=len(positions) * self._tokens_with(scored_ids),
                kind="score_at",  # positions share prefixes, so a token takes far less time than in `score`
            ),
        )
        rows = msgspec.structs.replace(rows, topk_ids=self._stages.ends.swapped(rows.topk_ids))
        limit = self._stages.common.limit
        return rows if limit is None else known_positions(rows, limit)

    async def _kept(
        self, kind: type[Kept], asked: tuple[IntArray | int, ...], ask: Callable[[], Awaitable[Kept]]
    ) -> Kept:
        """Return the teacher's answer. Where the cache has it, this takes no turn and sends no request."""
        kept, prompt = self._stages.kept_scores, self._prompt
        if kept is None:
            return await ask()
        key = (prompt.token_ids, *asked, self._stages.sampling.temperature)
        return await kept.fetch(kind, key, ask, what=f"prompt {prompt.ordinal} (problem {prompt.problem.id!r})")

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        services = self._stages.services

        def score(reference: Any, deadline: float) -> Awaitable[TokenScores]:
            ask = reference.score_base if services.reference_is_base else reference.score
            scores: Awaitable[TokenScores] = ask(self._request(response_ids, deadline), top_k=1)
            return scores

        scores = await _given(self._stages.reference, services.reference, "reference").ask(
            (self._prompt.ordinal,),
            score,
            session=self._session,
            tokens=self._tokens_with(response_ids),
        )
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
        expected = None if self._stages.weights_may_change else version
        return await self._stages.candidates.ask(
            (self._prompt.ordinal,),
            lambda student, deadline: student.candidate_logprobs(
                self._request(response_ids, deadline), positions, candidate_ids, expected_version=expected
            ),
            session=self._session,
            tokens=self._tokens_with(response_ids),
        )

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        budget = self._stages.sampling.max_response_tokens - position - 1
        if budget <= 0 or candidate_id in self._stages.stop_token_ids:
            return _empty_generation()  # the branch is verified as it stands
        return await self._generate(
            self._stages.probe,
            (self._prompt.ordinal, position),
            branch_root(self._prompt.token_ids, response_ids, position, candidate_id),
            self._settings(budget, "probe", position, candidate_id, n),
        )

    async def verify(self, response_ids: IntArray) -> Verdict:
        return await ask_verdict(
            self._stages.verify,
            (self._prompt.ordinal,),
            self._prompt.problem,
            self.decode(response_ids),
        )

    def decode(self, token_ids: IntArray) -> str:
        return self._stages.vocabulary.decode(token_ids)

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

    def _request(self, response_ids: IntArray, deadline: float) -> ScoreRequest:
        return ScoreRequest(self._prompt.token_ids, response_ids, self._stages.sampling.temperature, deadline)

    def _tokens_with(self, response_ids: IntArray) -> int:
        return len(self._prompt.token_ids) + len(response_ids)

    def _settings(self, max_tokens: int, *request: int | str) -> SamplingSettings:
        sampling = self._stages.sampling
        return SamplingSettings(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            stop_token_ids=self._stages.stop_token_ids,
            seed=derive_seed(self._stages.run_seed, self._prompt.ordinal, *request),
            vocab_limit=self._stages.common.limit,
        )


def _given(stage: Stage[T | None], service: object, need: str) -> Stage[T]:
    """Return a stage that only some policies use. Raise LookupError if the policy's needs do not state it: a bug."""
    if service is None:
        raise LookupError(f"the policy asks for what its needs do not state: {need}")
    return cast("Stage[T]", stage)


def _scoring_positions(scorer: Scorer) -> PositionScorer:
    if not isinstance(scorer, PositionScorer):
        raise LookupError("the policy asks the teacher for single positions, which its backend does not offer")
    return scorer


def _scoring_candidates(scorer: Scorer) -> CandidateScorer:
    if not isinstance(scorer, CandidateScorer):
        raise LookupError(
            "stages.score.end_token=sum asks the teacher for chosen tokens, which its backend does not offer"
        )
    return scorer


def _tokens_generated(generation: Generation) -> int:
    return len(generation.token_ids)


@functools.cache
def _empty_generation() -> Generation:
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason="stop",
        version_spans=(),
    )
