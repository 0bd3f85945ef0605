"""Notes the requests that a run's policy makes for a few prompts, and sends them again in the same proportions.

It knows no method. The policy supervises some prompts as always, through stages that note each request as a template. A
template can be sent again for another prompt, with other seeds and in another session.

* Requests that need only a prompt (rollouts, the teacher's responses) take the next prompt of the run's schedule, so
  that none is sent twice.
* Requests about a response (scores, candidates, probes, what continues a prefix) repeat the noted one, so a server's
  prefix cache helps them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

import msgspec
import numpy as np

from spot_async.base.tasks import gather
from spot_async.errors import ConfigError
from spot_async.models.common_vocabulary import EndTokens
from spot_async.protocols import Policy, PromptStages
from spot_async.stages.plugin_contract import supervise
from spot_async.stages.services import STAGE_SERVERS
from spot_async.stages.stages import Stages
from spot_async.telemetry.totals import GENERATING
from spot_async.tools.simulate.lengths import RecordedPrompt
from spot_async.types import (
    Capabilities,
    ChatTurn,
    FloatArray,
    Generation,
    IntArray,
    Judgement,
    Prompt,
    ScoredPositions,
    TokenScores,
    WeightVersion,
)

T = TypeVar("T")
Ask = Callable[[PromptStages], Awaitable[Any]]


@dataclass(frozen=True)
class Template:
    """A request that the policy made, which can be made again."""

    stage: str
    prompt: Prompt  # the prompt that it was made for
    ask: Ask
    tokens: int  # in its answer
    begins: bool = False  # whether it asks for a response from its beginning, of which a prompt is all that it needs
    prompt_tokens: int = 0  # before the response

    @property
    def server(self) -> str:
        return STAGE_SERVERS[self.stage]


@dataclass(frozen=True)
class Request:
    """A template that is about to be sent for one prompt."""

    stage: str
    send: Callable[[], Awaitable[int]]  # returns the answer's tokens


class NotedStages:
    """`protocols.PromptStages` that passes requests on, and notes those that were sent and answered."""

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

    def written_response(self) -> Generation:
        return self._stages.written_response()

    def decode(self, token_ids: IntArray) -> str:
        return self._stages.decode(token_ids)

    async def rollout(self, **asked: Any) -> Generation:
        return await self._noted("rollout", lambda stages: stages.rollout(**asked), asked)

    async def teacher_response(self, **asked: Any) -> Generation:
        return await self._noted("teacher_response", lambda stages: stages.teacher_response(**asked), asked)

    def teacher_prompt(self, *turns: ChatTurn | str) -> IntArray:
        return self._stages.teacher_prompt(*turns)

    async def score(self, response_ids: IntArray, *, top_k: int, prompt_ids: IntArray | None = None) -> TokenScores:
        read_ids = self._prompt.read_by_teacher if prompt_ids is None else prompt_ids
        return await self._noted(
            "score", lambda stages: stages.score(response_ids, top_k=top_k, prompt_ids=prompt_ids), read_ids=read_ids
        )

    async def score_at(
        self, response_ids: IntArray, positions: IntArray, *, top_k: int, prompt_ids: IntArray | None = None
    ) -> ScoredPositions:
        return await self._noted(
            "score", lambda stages: stages.score_at(response_ids, positions, top_k=top_k, prompt_ids=prompt_ids)
        )

    async def teacher_candidates(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        prompt_ids: IntArray | None = None,
    ) -> FloatArray:
        return await self._noted(
            "score",
            lambda stages: stages.teacher_candidates(response_ids, positions, candidate_ids, prompt_ids=prompt_ids),
        )

    async def reference_logprobs(self, response_ids: IntArray) -> FloatArray:
        return await self._noted("reference", lambda stages: stages.reference_logprobs(response_ids))

    async def candidate_logprobs(
        self,
        response_ids: IntArray,
        positions: IntArray,
        candidate_ids: IntArray,
        *,
        version: WeightVersion | None = None,
    ) -> FloatArray:
        return await self._noted(
            "candidates",
            lambda stages: stages.candidate_logprobs(response_ids, positions, candidate_ids, version=version),
        )

    async def probe(self, response_ids: IntArray, position: int, candidate_id: int, *, n: int) -> Generation:
        return await self._noted("probe", lambda stages: stages.probe(response_ids, position, candidate_id, n=n))

    async def verify(self, response_ids: IntArray) -> Judgement:
        return await self._noted("verify", lambda stages: stages.verify(response_ids))

    async def _noted(
        self,
        stage: str,
        ask: Callable[[PromptStages], Awaitable[T]],
        asked: Mapping[str, Any] | None = None,
        read_ids: IntArray | None = None,
    ) -> T:
        """Pass a request on. `asked` is of one that generates, `read_ids` the prompt before what the teacher scores."""
        answer = await ask(self._stages)
        # A probe with nothing left to sample is answered without a request.
        if not (isinstance(answer, Generation) and not answer.version_spans):
            begins = asked is not None and not asked.keys() & {"prompt_ids", "prefix_ids"}
            read = len(self._prompt.token_ids if read_ids is None else read_ids)
            self._templates.append(Template(stage, self._prompt, ask, tokens_of(answer, read), begins, read))
        return answer


def tokens_of(answer: Any, prompt_tokens: int) -> int:
    """Return the tokens that an answer generated, or scored with its prompt; candidates and verdicts count none."""
    match answer:
        case Generation():
            return len(answer.token_ids)
        case TokenScores():
            return prompt_tokens + len(answer.logprobs)
        case np.ndarray(ndim=1):  # the reference's log-probabilities
            return prompt_tokens + len(answer)
        case _:
            return 0


async def note_requests(policy: Policy, stages: Stages, prompts: Sequence[Prompt]) -> list[Template]:
    """Let the policy supervise `prompts` at the same time, and return the requests that it made.

    Raises what a failed request raised, and ConfigError if there are none.
    """
    templates: list[Template] = []
    await gather(
        supervise(policy, prompt, NotedStages(stages.for_prompt(prompt), prompt, templates)) for prompt in prompts
    )
    if not templates:
        raise ConfigError(f"policy {type(policy).__name__} asks no server for these prompts, so there is none to tune")
    return templates


def endless(templates: Sequence[Template], stages: Stages, prompts: Iterator[Prompt], seed: int) -> Iterator[Request]:
    """Return requests in the templates' proportions, without end. Each round has the noted prompts in a new order.

    `prompts` are further prompts of the run. In each round, each noted prompt is replaced by one of them, whose ordinal
    gives its requests other seeds and another session.
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
    prompt = drawn if template.begins else msgspec.structs.replace(template.prompt, ordinal=drawn.ordinal)

    async def send() -> int:
        return tokens_of(await template.ask(stages.for_prompt(prompt)), template.prompt_tokens)

    return Request(template.stage, send)


def recorded_prompts(templates: Sequence[Template]) -> list[RecordedPrompt]:
    """Return the prompts, with the tokens that were generated for each; of written responses those that were scored."""
    by_prompt: dict[int, list[Template]] = {}
    for template in templates:
        by_prompt.setdefault(template.prompt.ordinal, []).append(template)
    return [
        RecordedPrompt(
            responses,
            [template.tokens for template in own if template.stage in GENERATING and not template.begins],
            mean([template.prompt_tokens for template in own if template.stage == "score"] or [own[0].prompt_tokens]),
        )
        for own in by_prompt.values()
        if (responses := [template.tokens for template in own if template.begins] or _scored(own))
    ]


def _scored(templates: Sequence[Template]) -> list[int]:
    return [each.tokens - each.prompt_tokens for each in templates if each.stage == "score" and each.tokens]


def by_server(templates: Sequence[Template]) -> dict[str, list[Template]]:
    """Return the templates by the server that they ask, in the order of the stages."""
    found = {server: [t for t in templates if t.server == server] for server in dict.fromkeys(STAGE_SERVERS.values())}
    return {server: own for server, own in found.items() if own}
