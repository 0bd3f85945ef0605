"""A run's own mix of requests: what its policy asks of the stages for a few prompts, noted, and asked again.

Nothing here knows a method. A policy supervises some prompts as it always does, through stages that note each request;
a template is that same request to the stages of any prompt. Sent again it is asked for by another one, with other seeds
and in another session. Requests that need nothing but a prompt (rollouts, the teacher's
responses) go on through the run's schedule, so that none is sent twice; those about a response (scores, candidates,
probes) repeat the noted one, and find what a server's prefix cache keeps of it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.base.concurrency import gather
from spot_async.models.end_tokens import EndTokens
from spot_async.protocols import Policy, PromptStages
from spot_async.stages.stages import STAGE_SERVERS, Stages
from spot_async.types import (
    Capabilities,
    FloatArray,
    Generation,
    IntArray,
    Prompt,
    ScoredPositions,
    TokenScores,
    Verdict,
    WeightVersion,
)

T = TypeVar("T")
Ask = Callable[[PromptStages], Awaitable[Any]]

ABOUT_A_PROMPT = {"rollout", "teacher_response"}  # stages whose requests hold a prompt and no response


@dataclass(frozen=True)
class Template:
    """One request that the policy made, to be made again."""

    stage: str
    prompt: Prompt  # whose it was
    ask: Ask
    tokens: int  # of its answer

    @property
    def server(self) -> str:
        return STAGE_SERVERS[self.stage]


@dataclass(frozen=True)
class Request:
    """A template as it is sent once."""

    stage: str
    send: Callable[[], Awaitable[int]]  # returns the answer's tokens


class NotedStages:
    """`protocols.PromptStages` that passes requests on and notes those that were sent and answered."""

    def __init__(self, stages: PromptStages, prompt: Prompt, templates: list[Template]) -> None:
        self._stages = stages
        self._prompt = prompt
        self._templates = templates

    @property
    def student(self) -> Capabilities | None:
        return self._stages.student

    @property
    def teacher(self) -> Capabilities | None:
        return self._stages.teacher

    @property
    def ends(self) -> EndTokens:
        return self._stages.ends

    def decode(self, token_ids: IntArray) -> str:
        return self._stages.decode(token_ids)

    async def rollout(self, *, n: int = 0, top_k: int = 0) -> Generation:
        return await self._noted("rollout", lambda stages: stages.rollout(n=n, top_k=top_k))

    async def teacher_response(self) -> Generation:
        return await self._noted("teacher_response", lambda stages: stages.teacher_response())

    async def score(self, response_ids: IntArray, *, top_k: int) -> TokenScores:
        return await self._noted("score", lambda stages: stages.score(response_ids, top_k=top_k))

    async def score_at(self, response_ids: IntArray, positions: IntArray, *, top_k: int) -> ScoredPositions:
        return await self._noted("score", lambda stages: stages.score_at(response_ids, positions, top_k=top_k))

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        return await self._noted("reference", lambda stages: stages.reference_logprobs(response_ids))

    async def candidate_logprobs(
        self, response_ids: IntArray, positions: IntArray, candidate_ids: IntArray, *, version: WeightVersion
    ) -> FloatArray:
        return await self._noted(
            "candidates",
            lambda stages: stages.candidate_logprobs(response_ids, positions, candidate_ids, version=version),
        )

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        return await self._noted("probe", lambda stages: stages.probe(response_ids, position, candidate_id, n=n))

    async def verify(self, response_ids: IntArray) -> Verdict:
        return await self._noted("verify", lambda stages: stages.verify(response_ids))

    async def _noted(self, stage: str, ask: Callable[[PromptStages], Awaitable[T]]) -> T:
        answer = await ask(self._stages)
        if not (isinstance(answer, Generation) and not answer.version_spans):  # a probe with nothing left to sample
            self._templates.append(Template(stage, self._prompt, ask, tokens_of(answer)))
        return answer


def tokens_of(answer: Any) -> int:
    """Tokens generated, or given log-probabilities by a scorer; candidates and verdicts have none of their own."""
    match answer:
        case Generation():
            return len(answer.token_ids)
        case TokenScores():
            return len(answer.logprobs)
        case np.ndarray(ndim=1):  # a reference's
            return len(answer)
        case _:
            return 0


async def note_requests(policy: Policy, stages: Stages, prompts: Sequence[Prompt]) -> list[Template]:
    """Everything that the policy asks for `prompts`, which it supervises at once.

    Raises what a failed request raised.
    """
    templates: list[Template] = []
    await gather(
        policy.supervise(prompt, NotedStages(stages.for_prompt(prompt), prompt, templates)) for prompt in prompts
    )
    return templates


def endless(templates: Sequence[Template], stages: Stages, prompts: Iterator[Prompt], seed: int) -> Iterator[Request]:
    """Requests in the templates' proportions for ever, in a new order each time round: by prompt, shuffled.

    `prompts` are prompts of the run that were not asked about yet. One stands in for a noted prompt each time: its
    ordinal gives all of that one's requests other seeds and another session.
    """
    draw = random.Random(seed)
    by_prompt: dict[int, list[Template]] = {}
    for template in templates:
        by_prompt.setdefault(template.prompt.ordinal, []).append(template)
    groups = list(by_prompt.values())
    while True:
        draw.shuffle(groups)
        for group in groups:
            drawn = next(prompts)
            for template in draw.sample(group, len(group)):
                yield _request(template, stages, drawn)


def _request(template: Template, stages: Stages, drawn: Prompt) -> Request:
    about_a_prompt = template.stage in ABOUT_A_PROMPT
    prompt = drawn if about_a_prompt else msgspec.structs.replace(template.prompt, ordinal=drawn.ordinal)

    async def send() -> int:
        return tokens_of(await template.ask(stages.for_prompt(prompt)))

    return Request(template.stage, send)


def by_server(templates: Sequence[Template]) -> dict[str, list[Template]]:
    """Templates of each server that the policy asks, in the order of the stages."""
    found = {server: [t for t in templates if t.server == server] for server in dict.fromkeys(STAGE_SERVERS.values())}
    return {server: own for server, own in found.items() if own}
