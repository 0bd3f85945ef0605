"""Makes the stages of a run, and the view of them that one prompt's coroutine gets.

`requests.py` gives requests their identity, and `teachers.py` has what differs from teacher to teacher.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.base.events import Channel, log_events_to_python_logging
from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S, RetryPolicy
from spot_async.base.seeds import derive_seed
from spot_async.config import StageConfig, teacher_role
from spot_async.errors import ContractError, DataError, PermanentError
from spot_async.models.alignment import branch_root
from spot_async.models.common_vocabulary import EndTokens, SameTokens
from spot_async.models.responses import first_tokens, foreign
from spot_async.models.vocabulary import Vocabulary, stop_token_ids
from spot_async.protocols import CandidateScorer, Environment, Generator, Policy
from spot_async.replicas.capabilities import combined
from spot_async.replicas.leasing import ServicePool, pool_of
from spot_async.stages.episode import Episode, Generate
from spot_async.stages.plugin_contract import ask_judgement
from spot_async.stages.prompt_episodes import PromptEpisodes
from spot_async.stages.requests import PromptRequests, content, given, identity, nothing
from spot_async.stages.services import (
    STATED_BY,
    EnvironmentService,
    Services,
    StagesSettings,
    TeacherService,
    requests_per_prompt,
    stage_server,
)
from spot_async.stages.stage import Stage, StageLimits, UpdatePause
from spot_async.stages.teachers import BoundTeacher, TeacherStages
from spot_async.types import (
    LEAST_NATS,
    NO_TOKEN,
    Capabilities,
    ChatTurn,
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
    Verdict,
    WeightVersion,
)

S = TypeVar("S")


class Stages:
    """All stages of a run. `for_prompt` gives a policy its view."""

    def __init__(
        self, services: Services, settings: StagesSettings, needs: PolicyNeeds, events: Channel | None = None
    ) -> None:
        """Make the stages of a policy with these `needs`. `events`: the channel to publish on; None makes a new one."""
        self.services = services
        self.settings = settings
        self.samples_per_prompt = needs.samples_per_prompt
        self.events = events or Channel()
        asked = services.teachers or {"": TeacherService()}
        alike = [each.vocabulary for each in asked.values() if each.vocabulary and each.own_tokens is None]
        self.stop_token_ids = stop_token_ids(services.vocabulary, *alike)
        self.pauses = {role: UpdatePause() for role in ("student", *services.following)}
        jitter = random.Random(derive_seed(settings.seed, "retry jitter")).random

        standstill_s = WEIGHT_UPDATE_TIMEOUT_S if settings.weights_may_change else 0.0
        requests = requests_per_prompt(needs)
        limits = settings.limits

        def stage(kind: str, service: S | ServicePool[S], own: StageConfig, which: str = "") -> Stage[S]:
            name = f"{kind}.{which}" if which else kind
            role = stage_server(name) or ""
            pause = self.pauses.get("student" if role in services.are_base else role)
            stage_limits = StageLimits(
                concurrency=own.concurrency,
                timeout_s=limits.timeout_s,
                attempt_timeout_s=limits.attempt_timeout_s,
                retry=RetryPolicy(limits.attempts),
                waiting_capacity=settings.max_prompts * requests[kind],
                requests_per_prompt=requests[kind] if settings.bounds_prompts else None,
                stated_by=STATED_BY[kind],
                longest_standstill_s=standstill_s if pause is not None else 0.0,
            )
            return Stage(
                name, pool_of(service), stage_limits, jitter=jitter, events=self.events, pause=pause or UpdatePause()
            )

        def teacher(name: str, service: TeacherService) -> TeacherStages:
            server: Any = service.server
            role = teacher_role(name)
            same = (services.vocabulary.end_token_ids, (service.vocabulary or services.vocabulary).end_token_ids)
            ends = EndTokens(*same, limits.score.end_token)
            offered = services.capabilities.get(role)
            if offered is not None and service.own_tokens is not None:  # of the student's tokens it says less
                less = {"exact_entropy": False, "candidate_logprobs": "none", "max_position_top_k": 0}
                offered = msgspec.structs.replace(offered, **less)
            return TeacherStages(
                name=name,
                role=role,
                service=service,
                follows=role in services.following,
                is_base=role in services.are_base,
                needs=needs,
                capabilities=offered,
                reader=service.own_tokens or SameTokens(ends, services.common, role),
                score=stage("score", server, limits.score, name),
                response=stage(
                    "teacher_response", server if needs.teacher_responses else None, limits.teacher_response, name
                ),
            )

        student: Any = services.student
        self.rollout: Stage[Generator] = stage("rollout", student, limits.rollout)
        self.teachers = {name: teacher(name, each) for name, each in asked.items()}
        self.candidates: Stage[CandidateScorer] = stage("candidates", student, limits.candidates)
        self.probe: Stage[Generator] = stage("probe", student, limits.probe)
        self.verify = stage("verify", services.verifier, limits.verify)
        self.reference = stage("reference", services.reference, limits.reference)
        played = services.environments
        made: dict[EnvironmentService, Stage[Environment]] = {}
        for key, each in played.items():
            if each not in made:
                which = key if len({*played.values()}) > 1 else ""
                made[each] = stage("environment", each.server, limits.environment, which)
        self.environments = {key: made[each] for key, each in played.items()}
        self.taught: dict[str, dict[bytes, Episode]] = {}  # by problem, for `PromptEpisodes`
        self.all: tuple[Stage[Any], ...] = (
            self.rollout,
            *(each.score for each in self.teachers.values()),
            self.candidates,
            self.probe,
            self.verify,
        )
        self.all += tuple(each.response for each in self.teachers.values()) if needs.teacher_responses else ()
        self.all += (self.reference,) if services.reference is not None else ()
        self.all += tuple(made.values())

    def teacher(self, name: str = "") -> TeacherStages:
        """Return a teacher's stages. Raise ContractError unless it is there, or is the only one and has no name."""
        if (found := self.teachers.get(name)) is not None:
            return found
        names = " and ".join(self.teachers)
        if not name:
            raise ContractError(
                f"the policy names no teacher, and the run has {names}: say which, by `teacher=`, or give policy.route"
            )
        given = f"only {names}" if names else "one without a name (`teacher`)"
        raise ContractError(f"the policy asks teacher {name!r}, and the run has {given}: see `teachers`")

    @property
    def tokens_generated(self) -> int:
        """The tokens of all rollouts, probes and responses of teachers so far."""
        writing = (self.rollout, self.probe, *(each.response for each in self.teachers.values()))
        return sum(stage.counters.work for stage in writing)

    def for_prompt(self, prompt: Prompt) -> BoundStages:
        return BoundStages(self, prompt)


def stages_for(policy: Policy, services: Services, settings: StagesSettings | None = None) -> Stages:
    """Return stages over services that run already: `await policy.supervise(prompt, stages.for_prompt(prompt))`.

    Events (a retry, a server's end) go to Python's `logging`, unless the program configured structlog.
    """
    log_events_to_python_logging()
    return Stages(services, settings or StagesSettings(), policy.needs)


class BoundStages:
    """Gives one prompt's coroutine its stages: a `protocols.PromptStages`."""

    def __init__(self, stages: Stages, prompt: Prompt) -> None:
        self._stages = stages
        self._prompt = prompt
        limit = stages.services.common.limit
        self._requests = PromptRequests(prompt, stages.settings, stages.stop_token_ids, limit)
        # What a teacher read before each response, where that was not the student's prompt, by the response's ids.
        self._read_before: dict[bytes, list[tuple[Vocabulary, IntArray]]] = {}
        self._plain: dict[int, bytes] = {}  # whole responses of the student's to the prompt: their ids, by number
        self._verdicts: dict[bytes, Verdict] = {}  # by the response's ids
        key = prompt.problem.set_key
        played = stages.services.environments.get(key)
        self._episodes: PromptEpisodes | None = None
        if played is not None:
            taught = stages.taught.setdefault(prompt.problem.id, {})
            self._episodes = PromptEpisodes(stages.environments[key], played, prompt, stages.settings.seed, taught)

    @property
    def student(self) -> Capabilities | None:
        return self._stages.services.capabilities.get("student")

    @cached_property
    def teachers(self) -> Mapping[str, float]:
        named, given = self._prompt.problem.teacher, self._stages.teachers.items()
        weights = {named: 1.0} if named else {name: each.service.weight for name, each in given}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    @cached_property
    def teacher(self) -> Capabilities | None:
        offered = [self._stages.teachers[name].capabilities for name in self.teachers]
        known = [each for each in offered if each is not None]
        return combined(known) if known else None

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
        own_ids = self._prompt.token_ids
        read_ids = own_ids if prompt_ids is None else prompt_ids
        most = len(prefix) + self._requests.longest(prefix, max_tokens)
        apart = str(n) if self._episodes else ""

        def generate(context_ids: IntArray, settings: SamplingSettings) -> Awaitable[Generation]:
            return self._requests.generate(self._stages.rollout, context_ids, settings, top_k=top_k, apart=apart)

        async def turn(before: IntArray) -> Generation:
            request = ("rollout", *identity(n, prompt_ids, before))
            room = most - len(before)
            return await self._requests.continued(request, read_ids, before, most=room, stop=stop, generate=generate)

        response = await self._written(turn, prefix, most=most, top_k=top_k)
        is_plain = prompt_ids is None and max_tokens is None and not len(prefix) + len(stop)
        if is_plain and n < self._stages.samples_per_prompt:
            self._plain[n] = content(response.token_ids)
        # Its log pi_old are those behind another prompt.
        return response if np.array_equal(read_ids, own_ids) else foreign(response)

    def teacher_prompt(self, *turns: ChatTurn | str, teacher: str = "") -> IntArray:
        return self._teacher(teacher).render(*turns)

    async def teacher_response(
        self,
        *,
        teacher: str = "",
        n: int = 0,
        prefix_ids: IntArray | Sequence[int] = (),
        max_tokens: int | None = None,
        **asked: Any,
    ) -> Generation:
        writer, prefix = self._teacher(teacher), np.asarray(prefix_ids, np.int32)
        most = len(prefix) + self._requests.longest(prefix, max_tokens)
        apart = f"teacher-{n}" if self._episodes else ""

        def turn(before: IntArray) -> Awaitable[Generation]:
            return writer.response(n=n, prefix_ids=before, max_tokens=most - len(before), apart=apart, **asked)

        return await self._written(turn, prefix, most=most, is_taught=True)

    async def _written(self, turn: Generate, prefix: IntArray, *, most: int, **how: Any) -> Generation:
        """Return what a model writes after a prefix. Beside an environment it writes the turns of an episode."""
        if self._episodes is None:
            return await turn(prefix)
        if len(prefix):
            raise ContractError("the policy continues a prefix, and nobody knows which turn of an environment's it is")
        return await self._episodes.play(turn, most=most, **how)

    async def score(self, response_ids: IntArray, *, teacher: str = "", **asked: Any) -> TokenScores:
        scores = await self._teacher(teacher).score(response_ids, **asked)
        return scores if self._episodes is None else self._episodes.counted(response_ids, scores)

    async def score_at(
        self, response_ids: IntArray, positions: IntArray, *, teacher: str = "", **asked: Any
    ) -> ScoredPositions:
        return await self._teacher(teacher).score_at(response_ids, positions, **asked)

    async def teacher_candidates(
        self, response_ids: IntArray, positions: IntArray, candidate_ids: IntArray, *, teacher: str = "", **asked: Any
    ) -> FloatArray:
        return await self._teacher(teacher).candidates(response_ids, positions, candidate_ids, **asked)

    def _teacher(self, name: str) -> BoundTeacher:
        teacher = self._stages.teacher(name or self._prompt.problem.teacher)
        note_read = partial(self._note_read, teacher.service.vocabulary or self._stages.services.vocabulary)
        ends = teacher.reader.ends or self._stages.stop_token_ids
        own = ends, teacher.reader.limit, teacher.service.temperature
        return BoundTeacher(teacher, self._prompt, PromptRequests(self._prompt, self._stages.settings, *own), note_read)

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        services = self._stages.services

        def score(reference: Any, request: ScoreRequest) -> Awaitable[TokenScores]:
            ask = reference.score_base if "reference" in services.are_base else reference.score
            scores: Awaitable[TokenScores] = ask(request, top_k=1)
            return scores

        stage = given(self._stages.reference, services.reference, "reference")
        scores = await self._requests.ask(stage, self._prompt.token_ids, response_ids, score)
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
        is_token = candidate_ids != NO_TOKEN  # an empty place asks about the first one, and its answer is thrown away
        asked = np.where(is_token, candidate_ids, np.maximum(candidate_ids[:, :1], 0))
        logprobs: FloatArray = await self._requests.ask(
            self._stages.candidates,
            self._prompt.token_ids,
            response_ids,
            lambda student, request: student.candidate_logprobs(request, positions, asked, expected_version=expected),
        )
        return np.where(is_token, logprobs, np.float32(LEAST_NATS))

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        most, request = self._stages.settings.sampling.max_response_tokens, ("probe", position, candidate_id, n)
        apart = "-".join(map(str, request)) if self._episodes else ""

        async def turn(before: IntArray) -> Generation:
            own = () if len(before) == position + 1 else identity(0, None, before)  # of a later turn
            if len(before) >= most or int(before[-1]) in self._stages.stop_token_ids:
                return nothing("stop")  # the branch is verified as it stands
            context_ids = np.concatenate([self._prompt.token_ids, before], dtype=np.int32)
            settings = self._requests.sampling(most - len(before), *request, *own)
            ask = self._requests.generate
            return await ask(self._stages.probe, context_ids, settings, priority=(position,), apart=apart)

        if self._episodes is None:
            root = branch_root(self._prompt.token_ids, response_ids, position, candidate_id)
            return await turn(root[len(self._prompt.token_ids) :])
        return await self._episodes.play(
            turn, most=most, before=self._episodes.before(response_ids, position, candidate_id)
        )

    async def verify(self, response_ids: IntArray) -> Judgement:
        judgement = await ask_judgement(
            self._stages.verify,
            (self._prompt.ordinal,),
            self._prompt.problem,
            self.decode(response_ids if self._episodes is None else self._episodes.last_turn(response_ids)),
        )
        if self._episodes is not None:
            judgement = self._episodes.judged(response_ids, judgement)
        self._verdicts[content(response_ids)] = judgement.verdict
        return judgement

    def accuracy(self) -> dict[str, float]:
        """Return the share of the student's own responses that are right, as metrics; empty if none was judged.

        It is of what the student wrote to the prompt, whatever samples the policy makes of that.
        """
        verdicts = [self._verdicts[ids] for ids in self._plain.values() if ids in self._verdicts]
        rewards = [each.reward for each in verdicts if each.reward is not None]
        domain = self._prompt.problem.domain or self._prompt.problem.category
        names = ["rollout/accuracy", *([f"rollout/{domain}/accuracy"] if domain else [])]
        return dict.fromkeys(names, sum(rewards) / len(rewards)) if rewards else {}

    def recorded(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples, in their records what was asked for them otherwise than is usual.

        That is what the teacher read where that was not the student's prompt, and a `top_p` below 1.
        """
        top_p = self._stages.settings.sampling.top_p
        if top_p < 1:
            samples = [msgspec.structs.replace(each, record={**each.record, "top_p": top_p}) for each in samples]
        if self._episodes is not None:
            samples = [self._episodes.recorded(sample) for sample in samples]
        return [self._with_teacher_prompt(sample) for sample in samples] if self._read_before else samples

    def _with_teacher_prompt(self, sample: Sample) -> Sample:
        ids = sample.record.get("response_ids") if sample.supervision is None else sample.supervision.response_ids
        read = self._read_before.get(content(ids)) if isinstance(ids, np.ndarray) else None
        if read is None:
            return sample
        texts = dict.fromkeys(vocabulary.whole_text(ids) for vocabulary, ids in read)
        return msgspec.structs.replace(sample, record={**sample.record, "teacher_prompt": "\n\n".join(texts)})

    def _note_read(self, vocabulary: Vocabulary, read_ids: IntArray, response_ids: IntArray) -> None:
        if not np.array_equal(read_ids, self._prompt.token_ids):
            self._read_before.setdefault(content(response_ids), []).append((vocabulary, read_ids))

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
            token_ids = np.append(token_ids, np.int32(self._stages.services.vocabulary.end_token_ids[0]))
        written = Generation(
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            finish_reason="stop",
            version_spans=(),
        )
        return first_tokens(foreign(written), self._stages.settings.sampling.max_response_tokens)

    def decode(self, token_ids: IntArray) -> str:
        return self._stages.services.vocabulary.decode(token_ids)
