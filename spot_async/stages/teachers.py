"""Asks teachers: the stages of each, and the view of one that a prompt's coroutine gets.

A teacher reads a prompt of its own, ends responses with its own token and may have answers kept in a file. Here is what
hides that from policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.errors import ContractError, PermanentError
from spot_async.models.chunks import Reading
from spot_async.models.common_vocabulary import SameTokens, with_summed_last
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.responses import first_tokens
from spot_async.protocols import CandidateScorer, PositionScorer, Scorer
from spot_async.stages.requests import PromptRequests, given, identity
from spot_async.stages.services import TeacherService
from spot_async.stages.stage import Stage
from spot_async.types import (
    Capabilities,
    ChatTurn,
    FloatArray,
    Generation,
    IntArray,
    PolicyNeeds,
    Prompt,
    SamplingSettings,
    ScoredPositions,
    ScoreRequest,
    TokenScores,
)


class TeacherCandidates(msgspec.Struct, frozen=True):
    """The teacher's answer about chosen tokens, in the form in which it is kept."""

    logprobs: FloatArray  # (N, k)


Kept = TypeVar("Kept", TokenScores, ScoredPositions, TeacherCandidates, Generation)


@dataclass(frozen=True, kw_only=True)
class TeacherStages:
    """One teacher of a run, and what is asked of it for all prompts."""

    name: str  # empty for the only one
    role: str
    service: TeacherService
    follows: bool  # the student, so that its answers name their version
    is_base: bool  # of the student's servers, which are asked for it (`BaseScorer`)
    needs: PolicyNeeds
    capabilities: Capabilities | None  # None: it offers everything
    reader: SameTokens | OwnTokens
    score: Stage[Any]
    response: Stage[Any]


@dataclass(eq=False)
class BoundTeacher:
    """One teacher as one prompt's coroutine sees it. `protocols.PromptStages` says what the methods return."""

    teacher: TeacherStages
    prompt: Prompt
    requests: PromptRequests
    note_read: Callable[[IntArray, IntArray], None]  # is told what the teacher reads before a response

    def render(self, *turns: ChatTurn | str) -> IntArray:
        if (render := self.teacher.service.render_turns) is None:
            raise ContractError("the policy makes a prompt for the teacher, and these services have no render_turns")
        chat = [ChatTurn(role="user", content=turn) if isinstance(turn, str) else turn for turn in turns]
        return render(chat, self.prompt.problem.tools)

    async def response(
        self,
        *,
        n: int = 0,
        prompt_ids: IntArray | None = None,
        prefix_ids: IntArray | Sequence[int] = (),
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        apart: str = "",
    ) -> Generation:
        """`apart` is as in `PromptRequests.generate`."""
        teacher, reader, prefix = self.teacher, self.teacher.reader, np.asarray(prefix_ids, np.int32)
        named = (teacher.name,) if teacher.name else ()
        request = ("teacher response", *named, *identity(n, prompt_ids, prefix))
        read_ids = self._read(prompt_ids)
        writer = teacher.service.server if teacher.needs.teacher_responses else None
        stage = given(teacher.response, writer, "teacher_responses")

        def generate(context_ids: IntArray, settings: SamplingSettings) -> Awaitable[Generation]:
            # Without the seed: runs that differ in it share what a teacher wrote.
            ends = np.array(settings.stop_token_ids, np.int32)
            asked = (context_ids, n, settings.max_tokens, settings.top_p, ends, settings.vocab_limit)
            ask = partial(self.requests.generate, stage, context_ids, settings, apart=apart)
            return self._kept(Generation, asked, ask)

        room, own_prefix = self.requests.longest(prefix, max_tokens), reader.prefix(prefix)
        most = reader.most_for_one * room
        if teacher.capabilities is not None:  # in its context the student's room has place, and maybe no more
            most = min(most, max(room, teacher.capabilities.max_context_tokens - len(read_ids) - len(own_prefix)))
        response = await self.requests.continued(
            request,
            read_ids,
            own_prefix,
            most=most,
            stop=reader.stop(np.asarray(stop, np.int32)).tolist(),
            generate=generate,
        )
        response = first_tokens(reader.written(response, is_start=not len(prefix)), room)
        self.note_read(read_ids, np.concatenate([prefix, response.token_ids]))
        return response

    async def score(self, response_ids: IntArray, *, top_k: int, prompt_ids: IntArray | None = None) -> TokenScores:
        read_ids, offered, reader = self._read(prompt_ids), self.teacher.capabilities, self.teacher.reader
        most = None if offered is None else offered.max_context_tokens - len(read_ids)
        reading = reader.read(response_ids, most)
        if len(response_ids) and not len(reading.ids):  # nothing of it is text that the teacher could read
            return reader.scores(NOTHING_SCORED, reading, top_k)
        # A server that names tokens by text may know a response's own token where it does not know the likeliest.
        least = 1 if offered is None or offered.every_position else 0
        said = await self._scored(read_ids, reading, top_k=max(least, top_k))
        widest = offered.max_top_k if offered is not None else None
        if (wider := reader.wider(said, top_k, widest)) is not None:
            said = await self._scored(read_ids, reading, top_k=wider)
        self.note_read(read_ids, response_ids)
        if said.topk_ids.size > LARGE_SCORES:
            return await asyncio.to_thread(reader.scores, said, reading, top_k)
        return reader.scores(said, reading, top_k)

    async def _scored(self, read_ids: IntArray, reading: Reading, *, top_k: int) -> TokenScores:
        scored_ids, added_ids = reading.ids, reading.added_ids

        async def score(scorer: Any, request: ScoreRequest) -> TokenScores:
            ask = scorer.score_base if self.teacher.is_base else scorer.score
            scores: TokenScores = await ask(request, top_k=top_k)
            if not len(added_ids):
                return scores
            logprobs = await _scoring_candidates(scorer).candidate_logprobs(
                request,
                np.array([len(scored_ids) - 1], np.int32),
                added_ids[np.newaxis],
                expected_version=scores.version,
            )
            return with_summed_last(scores, logprobs[0])

        stage = self._scoring()
        scores = await self._kept(
            TokenScores,
            (read_ids, scored_ids, top_k, *([added_ids] if len(added_ids) else [])),
            lambda: self.requests.ask(stage, read_ids, scored_ids, score),
        )
        version = scores.version if self.teacher.follows else None
        return msgspec.structs.replace(scores, version=version)

    async def score_at(
        self, response_ids: IntArray, positions: IntArray, *, top_k: int, prompt_ids: IntArray | None = None
    ) -> ScoredPositions:
        read_ids, reader, stage = self._read(prompt_ids), self.teacher.reader, self._scoring()
        scored_ids = reader.read(response_ids).ids
        rows = await self._kept(
            ScoredPositions,
            (read_ids, scored_ids, top_k, positions),
            lambda: self.requests.ask(
                stage,
                read_ids,
                scored_ids,
                lambda scorer, request: _scoring_positions(scorer).score_at(request, positions, top_k=top_k),
                times=len(positions),
                kind="score_at",  # positions share prefixes, so a token takes far less time than in `score`
            ),
        )
        self.note_read(read_ids, response_ids)
        return reader.positions(rows)

    async def candidates(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        prompt_ids: IntArray | None = None,
    ) -> FloatArray:
        teacher, reader = self.teacher, self.teacher.reader
        scored_ids, asked_ids = reader.read(response_ids).ids, reader.candidates(candidate_ids)
        read_ids = self._read(prompt_ids)
        chooser = teacher.service.server if teacher.needs.teacher_candidates else None
        stage = given(teacher.score, chooser, "teacher_candidates")

        async def choose(scorer: Scorer, request: ScoreRequest) -> TeacherCandidates:
            return TeacherCandidates(
                await _scoring_candidates(scorer).candidate_logprobs(
                    request, positions, asked_ids, expected_version=None
                )
            )

        answer = await self._kept(
            TeacherCandidates,
            (read_ids, scored_ids, positions, asked_ids),
            lambda: self.requests.ask(stage, read_ids, scored_ids, choose, kind="teacher_candidates"),
        )
        self.note_read(read_ids, response_ids)
        return answer.logprobs

    def _scoring(self) -> Stage[Scorer]:
        return given(self.teacher.score, self.teacher.service.server, "teacher_top_k")

    async def _kept(
        self, kind: type[Kept], asked: tuple[IntArray | float | None, ...], ask: Callable[[], Awaitable[Kept]]
    ) -> Kept:
        """Return the teacher's answer. Where the cache has it, this takes no turn and sends no request."""
        kept, prompt = self.teacher.service.kept_scores, self.prompt
        if kept is None:
            return await ask()
        key = (*asked, self.requests.temperature)
        return await kept.fetch(kind, key, ask, what=f"prompt {prompt.ordinal} (problem {prompt.problem.id!r})")

    def _read(self, prompt_ids: IntArray | None = None) -> IntArray:
        """Return what the teacher reads before a response: the ids that a policy gives, or the prompt's."""
        own_ids, stated = self.prompt.read_by(self.teacher.name), self.teacher.needs.teacher_prompt_tokens
        if prompt_ids is None:
            return own_ids
        if len(prompt_ids) > max(stated, len(self.prompt.token_ids), len(own_ids)):
            raise (PermanentError if stated else ContractError)(
                f"a teacher's prompt has {len(prompt_ids)} tokens, and PolicyNeeds.teacher_prompt_tokens states "
                f"{stated}: write it shorter, or state more"
            )
        return prompt_ids


LARGE_SCORES = 8192  # entries of a top-k; more take over 10 ms and go to a thread
NOTHING_SCORED = TokenScores(
    logprobs=np.zeros(0, np.float32),
    topk_ids=np.zeros((0, 0), np.int32),
    topk_logprobs=np.zeros((0, 0), np.float32),
    entropy=np.zeros(0, np.float32),
    entropy_lower=np.zeros(0, np.float32),
    entropy_upper=np.zeros(0, np.float32),
    version=None,
)


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
